"""docs/settings.md is what `python -m seamless_verl.config --settings` prints, and every setting has a meaning."""

from __future__ import annotations

import sys

import pytest
from support.paths import ROOT

from seamless_verl.config.__main__ import main
from seamless_verl.config.composing import HERE
from seamless_verl.config.schema import NODE, SeamlessConfig
from seamless_verl.runtime.fields import rows


def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["config", *arguments])
    main()
    return capsys.readouterr().out


def test_the_page_is_current(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert printed(monkeypatch, capsys, "--settings") == page, (
        "run `python -m seamless_verl.config --settings > docs/settings.md`"
    )
    cells = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    assert len(cells) > 40 and all(len(row) == 5 and row[-1].rstrip(" |") for row in cells)


def test_the_folder_of_configs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(monkeypatch, capsys) == f"{HERE}\n"


def test_every_setting_has_a_meaning() -> None:
    assert [row.key for row in rows(SeamlessConfig, NODE) if not row.meaning] == []
