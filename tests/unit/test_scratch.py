"""The scratch folder: whose it is, when it goes, and what is none."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from seamless_verl.scratch import LOCK, LONGEST, remove_left, scratch_folder

HOLDER = """
from seamless_verl.scratch import scratch_folder
with scratch_folder() as folder:
    print(folder, flush=True)
    input()
"""


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An own TMPDIR, short enough."""
    with tempfile.TemporaryDirectory(prefix="t") as folder, monkeypatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", None)
        yield Path(folder)


def test_it_goes_with_all_in_it(parent: Path) -> None:
    with scratch_folder() as folder:
        assert folder.parent == parent and os.listdir(folder) == [LOCK]
        (folder / "shut" / "inner").mkdir(parents=True)
        (folder / "shut" / "inner" / "file").touch()
        (folder / "shut" / "inner").chmod(0)
        (folder / "shut").chmod(0o500)
    assert not os.listdir(parent)


def test_only_what_nobody_holds_is_removed(parent: Path) -> None:
    others = {parent / "sf-download", parent / "seamless-agent-12345678"}
    for other in others:
        other.mkdir()
    command = [sys.executable, "-c", HOLDER]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as holder,
        scratch_folder() as mine,
    ):
        assert holder.stdout is not None
        theirs = Path(holder.stdout.readline().strip())
        remove_left(parent)
        assert set(parent.iterdir()) == others | {mine, theirs}
        holder.kill()
        holder.wait()
        assert theirs.exists()
        remove_left(parent)
        assert set(parent.iterdir()) == others | {mine}
    assert set(parent.iterdir()) == others


def test_a_path_too_long_for_sockets_is_not_used_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    long = tmp_path / ("x" * LONGEST)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with scratch_folder() as folder:
        assert folder.parent == Path("/tmp")
    told = capsys.readouterr().err
    assert f"TMPDIR={str(long)!r}: too long" in told and f"at most {LONGEST} bytes" in told
    assert not os.listdir(long)
