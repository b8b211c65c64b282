"""The scratch folder: whose it is, when it goes, and what is none."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from support.scratch import parent

from seamless_verl.runtime import scratch
from seamless_verl.runtime.scratch import (
    LOCK,
    PROCESSES,
    SESSION,
    longest,
    remove,
    remove_left,
    scratch_folder,
    session_folder,
)

__all__ = ["parent"]


def test_it_goes_with_all_in_it(parent: Path) -> None:
    with scratch_folder() as folder:
        assert folder.parent == parent and os.listdir(folder) == [LOCK]
        (folder / "shut" / "inner").mkdir(parents=True)
        (folder / "shut" / "inner" / "file").touch()
        (folder / "shut" / "inner").chmod(0)
        (folder / "shut").chmod(0o500)
    assert not os.listdir(parent)


def test_a_folder_of_another_host_is_not_judged(parent: Path) -> None:
    """Its lock, held or not, is one that this host may not see."""
    theirs = parent / "sf-elsewher"
    theirs.mkdir()
    (theirs / f"not-{LOCK}").touch()
    with scratch_folder() as mine:
        remove_left(parent)
        assert set(parent.iterdir()) == {mine, theirs}


def test_the_lock_goes_last(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is killed while it removes leaves a folder that the next one removes."""
    real, seen = shutil.rmtree, list[tuple[str, bool, bool]]()

    def watched(path: Path, **options: bool) -> None:
        ignored = all(signal.getsignal(number) is signal.SIG_IGN for number in scratch.SIGNALS)
        seen.append((path.name, (folder / LOCK).exists(), ignored))
        real(path, **options)

    before = [signal.getsignal(number) for number in scratch.SIGNALS]
    with scratch_folder() as folder, monkeypatch.context() as patch:
        (folder / "inner").mkdir()
        (folder / "file").touch()
        patch.setattr(shutil, "rmtree", watched)
        remove(folder)
    assert seen == [("inner", True, True), (folder.name, True, True)] and not folder.exists()
    assert [signal.getsignal(number) for number in scratch.SIGNALS] == before


def test_what_cannot_be_deleted_is_said_and_left_to_the_next_run(
    parent: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a file that a dying process holds on a network's disk, which a test cannot bring about."""
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda path, **_: None)
        with scratch_folder() as folder:
            (folder / "inner").mkdir()
    assert set(os.listdir(folder)) == {LOCK, "inner"} and f"{folder} is not all deleted" in capsys.readouterr().err
    remove_left(parent)
    assert not folder.exists()


def grown(folder: Path, length: int) -> Path:
    """A folder below this one whose path has that many bytes."""
    long = folder / ("x" * (length - len(f"{folder}/")))
    long.mkdir()
    return long


@pytest.mark.parametrize(
    ("below", "what"), [(PROCESSES, "This run's temporary files are"), (SESSION, "Ray's session is")]
)
def test_a_path_too_long_for_sockets_is_not_used_and_that_is_said(
    parent: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], below: int, what: str
) -> None:
    monkeypatch.setattr(scratch, "SYSTEM", parent)
    fits = grown(parent, longest(below))
    monkeypatch.setattr(tempfile, "tempdir", str(fits))
    with scratch_folder(below) as folder:
        assert folder.parent == fits and not capsys.readouterr().err
        assert len(f"{folder}") + below == scratch.SOCKET
    long = grown(parent, longest(below) + 1)
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with scratch_folder(below) as folder:
        assert folder.parent == parent
    told = capsys.readouterr().err
    assert f"TMPDIR={str(long)!r}: too long" in told and f"{what} in {parent}. " in told
    assert f"at most {longest(below)} bytes" in told and not os.listdir(long)


def test_only_rays_session_moves_where_the_others_have_room(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "SYSTEM", parent)
    with scratch_folder() as folder, session_folder(folder) as session:
        assert session == folder
    monkeypatch.setattr(tempfile, "tempdir", str(long := grown(parent, longest(SESSION) + 1)))
    with scratch_folder() as folder, session_folder(folder) as session:
        assert (folder.parent, session.parent) == (long, parent)
    assert set(parent.iterdir()) == {long} and not os.listdir(long)
