"""The scratch folder: who holds it, and when it is removed."""

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
    PROCESS_SOCKETS,
    RAY_SOCKETS,
    max_parent_bytes,
    remove,
    remove_abandoned,
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
    with scratch_folder() as own:
        remove_abandoned(parent)
        assert set(parent.iterdir()) == {own, theirs}


def test_the_lock_goes_last(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed while it removes the folder leaves one that the next run removes."""
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


def test_what_cannot_be_deleted_is_reported_and_left_to_the_next_run(
    parent: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a file that a dying process holds on a network's disk, which a test cannot bring about."""
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda path, **_: None)
        with scratch_folder() as folder:
            (folder / "inner").mkdir()
    assert set(os.listdir(folder)) == {LOCK, "inner"} and f"{folder} is not all deleted" in capsys.readouterr().err
    remove_abandoned(parent)
    assert not folder.exists()


def folder_of_length(folder: Path, length: int) -> Path:
    """A folder below this one whose path has that many bytes."""
    long = folder / ("x" * (length - len(f"{folder}/")))
    long.mkdir()
    return long


@pytest.mark.parametrize(
    ("socket_bytes", "content"),
    [(PROCESS_SOCKETS, "This run's temporary files are"), (RAY_SOCKETS, "Ray's session is")],
)
def test_a_path_too_long_for_sockets_is_not_used_and_that_is_reported(
    parent: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], socket_bytes: int, content: str
) -> None:
    monkeypatch.setattr(scratch, "FALLBACK", parent)
    fits = folder_of_length(parent, max_parent_bytes(socket_bytes))
    monkeypatch.setattr(tempfile, "tempdir", str(fits))
    with scratch_folder(socket_bytes) as folder:
        assert folder.parent == fits and not capsys.readouterr().err
        assert len(f"{folder}") + socket_bytes == scratch.SOCKET_PATH_BYTES
    long = folder_of_length(parent, max_parent_bytes(socket_bytes) + 1)
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with scratch_folder(socket_bytes) as folder:
        assert folder.parent == parent
    message = capsys.readouterr().err
    assert f"TMPDIR={str(long)!r}: too long" in message and f"{content} in {parent}. " in message
    assert f"at most {max_parent_bytes(socket_bytes)} bytes" in message and not os.listdir(long)


def test_only_rays_session_moves_where_the_others_have_room(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "FALLBACK", parent)
    with scratch_folder() as folder, session_folder(folder) as session:
        assert session == folder
    monkeypatch.setattr(tempfile, "tempdir", str(long := folder_of_length(parent, max_parent_bytes(RAY_SOCKETS) + 1)))
    with scratch_folder() as folder, session_folder(folder) as session:
        assert (folder.parent, session.parent) == (long, parent)
    assert set(parent.iterdir()) == {long} and not os.listdir(long)
