"""The view's bench from end to end: a real run whose page is asked while it runs, beside one that has none."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from support.job import small_run
from support.paths import DATA

from seamless_verl.tools.bench.view import main

pytestmark = [pytest.mark.integration, pytest.mark.long]


def test_a_page_is_asked_while_its_run_goes_on(
    nano: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(DATA))  # where the job's agents are
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    sizes = ["--rounds", "1", "--steps", "8", "--skip", "2", "--out", str(tmp_path / "out")]
    assert main([*small_run(nano), *sizes]) == 0
    alone, viewed = (line.split() for line in capsys.readouterr().out.splitlines()[-2:])
    assert alone[0] == "alone-seed1-r1" and viewed[0] == "viewed-seed1-r1"
    assert float(alone[1]) > 0 and float(viewed[1]) > 0
    assert 0 < float(viewed[2].rstrip("%")) < 20 and int(viewed[3]) >= 3
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
