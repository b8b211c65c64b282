"""A stopped or killed run leaves only finished checkpoints, and leaves those of others alone."""

from __future__ import annotations

import json
import os
import resource
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoints import save, write_tracker

from seamless_verl.errors import CheckpointError
from seamless_verl.runtime.checkpoint_cleanup import (
    CleanupReport,
    clean_up_run,
    marked_save,
    refreshing_marker,
    register_run,
    remove_emptied,
)
from seamless_verl.runtime.checkpoint_marker import (
    EXPIRY_S,
    TRACKER,
    CheckpointMarker,
    ProcessIdentity,
    marker_file,
    saved_steps,
)
from seamless_verl.runtime.console import RUN_FILE

DEAD = 2**22 + 1  # above Linux's largest process id


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(RUN_FILE, str(tmp_path / "run.json"))
    return tmp_path / "run.json"


def tracker(folder: Path) -> str:
    return (folder / TRACKER).read_text()


def start(folder: Path, *, seamless: bool = True, async_save: bool = False) -> None:
    register_run(str(folder), seamless=seamless, async_save=async_save)


def interrupted_save(folder: Path, step: int, *, empty_tracker: bool = False, files: bool = False) -> None:
    """A save by our trainer that does not come to its end."""
    with pytest.raises(InterruptedError), marked_save(str(folder), step):
        save(folder, step, finish=False)
        if files:
            (folder / f"global_step_{step}" / "actor" / "weights").touch()
            (folder / f"global_step_{step}" / "data.pt").touch()
        if empty_tracker:
            write_tracker(folder, "")
        raise InterruptedError


def other_run(folder: Path, step: int | None, *, pid: int, host: str | None = None) -> None:
    """Another run's marker, made before anything was saved."""
    process = ProcessIdentity(pid, None, ProcessIdentity.of(os.getpid()).system)
    CheckpointMarker("other", step, [], None, host or socket.gethostname(), (process,), True).write(folder)


def on_another_system(process: ProcessIdentity) -> ProcessIdentity:
    return replace(process, system="another boot, or another container")


def test_a_marker_whose_supervisor_lives_is_left_to_it(tmp_path: Path, run_file: Path) -> None:
    me, dead = ProcessIdentity.of(os.getpid()), ProcessIdentity(DEAD, 1.0, ProcessIdentity.of(os.getpid()).system)
    marker = CheckpointMarker("other", 6, [], None, socket.gethostname(), (dead, me), False)
    save(tmp_path, 6, finish=False)
    marker.write(tmp_path)
    assert register_run(str(tmp_path), seamless=True, async_save=False) == CleanupReport() and saved_steps(
        tmp_path
    ) == {6}
    replace(marker, processes=(dead,)).write(tmp_path)
    assert register_run(str(tmp_path), seamless=True, async_save=False).removed == (tmp_path / "global_step_6",)


def test_a_marker_from_elsewhere_protects_while_it_is_refreshed(tmp_path: Path, run_file: Path) -> None:
    start(tmp_path)
    interrupted_save(tmp_path, 6)
    me = on_another_system(ProcessIdentity.of(os.getpid()))
    CheckpointMarker("other", 6, [], None, socket.gethostname(), (me,), False).write(tmp_path)
    assert clean_up_run(run_file) == CleanupReport()
    other, now = marker_file(tmp_path, "other"), time.time()
    os.utime(other, (now, now - EXPIRY_S - 5))
    start(tmp_path)
    assert saved_steps(tmp_path) == {6} and other.exists()  # left to its host
    save(tmp_path, 5)
    interrupted_save(tmp_path, 7)
    os.utime(other, (now, now - EXPIRY_S + 30))
    replace(CheckpointMarker.read(other), step=7).write(tmp_path)
    assert clean_up_run(run_file) == CleanupReport()
    start(tmp_path)
    interrupted_save(tmp_path, 8)
    replace(CheckpointMarker.read(other), step=8).write(tmp_path)
    os.utime(other, (now, now - EXPIRY_S - 5))
    assert clean_up_run(run_file).removed == (tmp_path / "global_step_8",)
    assert not list(tmp_path.glob(".clock*"))


def test_a_run_refreshes_its_marker_while_it_saves(tmp_path: Path, run_file: Path) -> None:
    start(tmp_path, seamless=False)
    (marker,) = tmp_path.glob(".saving-*")
    os.utime(marker, (1, 1))
    with refreshing_marker(every=0.01):
        deadline = time.monotonic() + 10
        while marker.stat().st_mtime == 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        marker.unlink()  # as between saves: nothing is made anew
        time.sleep(0.05)
    assert time.monotonic() < deadline and not marker.exists()


def test_a_finished_save_leaves_no_marker_and_an_unsupervised_one_makes_none(
    tmp_path: Path, run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(tmp_path)
    with marked_save(str(tmp_path), 1):
        assert len(list(tmp_path.glob(".saving-*"))) == 1
        save(tmp_path, 1)
    assert not list(tmp_path.glob(".*")) and clean_up_run(run_file) == CleanupReport()
    monkeypatch.delenv(RUN_FILE)
    with marked_save(str(tmp_path), 2):
        assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("supervised", [False, True])
def test_a_save_that_the_disk_fails_says_so_whatever_its_error(
    tmp_path: Path, run_file: Path, monkeypatch: pytest.MonkeyPatch, supervised: bool
) -> None:
    start(tmp_path) if supervised else monkeypatch.delenv(RUN_FILE)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    full = pytest.raises(CheckpointError, match=r"step 3 could not be saved in .*: File too large\. Repair that")
    with full, marked_save(str(tmp_path), 3):
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        raise RuntimeError("unexpected pos 704 vs 598")  # torch's, after a write that failed
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with pytest.raises(CheckpointError, match="No space left on device"), marked_save(str(tmp_path), 3):
        raise RuntimeError("Worker failure: [Errno 28] No space left on device")  # what it wrote is gone already
    with pytest.raises(RuntimeError, match="of another kind"), marked_save(str(tmp_path), 3):
        raise RuntimeError("of another kind")


def test_what_was_there_before_stays(tmp_path: Path, run_file: Path) -> None:
    save(tmp_path, 9)
    save(tmp_path, 5)
    save(tmp_path, 7, finish=False)  # an earlier run's, which the user may know about
    start(tmp_path)
    interrupted_save(tmp_path, 9)  # anew
    assert clean_up_run(run_file) == CleanupReport(overwritten=(tmp_path / "global_step_9",))
    interrupted_save(tmp_path, 6)
    assert clean_up_run(run_file) == CleanupReport(removed=(tmp_path / "global_step_6",))
    assert saved_steps(tmp_path) == {5, 7, 9} and tracker(tmp_path) == "5"


@pytest.mark.parametrize("seamless", [True, False])
def test_a_run_that_starts_over_is_not_fooled_by_an_old_tracker(tmp_path: Path, run_file: Path, seamless: bool) -> None:
    save(tmp_path, 50)
    start(tmp_path, seamless=seamless)
    interrupted_save(tmp_path, 25)
    assert clean_up_run(run_file).removed == (tmp_path / "global_step_25",)


@pytest.mark.parametrize("seamless", [True, False])
@pytest.mark.parametrize(("pid", "host", "kept"), [
    pytest.param(os.getpid(), None, {5, 6}, id="alive"), pytest.param(DEAD, None, {5}, id="dead"),
    pytest.param(DEAD, "another-host", {5, 6}, id="elsewhere"),
])  # fmt: skip
def test_what_another_living_run_saves_stays(
    tmp_path: Path, run_file: Path, seamless: bool, pid: int, host: str | None, kept: set[int]
) -> None:
    save(tmp_path, 5)
    start(tmp_path, seamless=seamless)
    interrupted_save(tmp_path, 6)
    other_run(tmp_path, 6, pid=pid, host=host)
    clean_up_run(run_file)
    assert saved_steps(tmp_path) == kept and marker_file(tmp_path, "other").exists()


def test_a_run_of_verls_that_may_save_any_step_protects_all(tmp_path: Path, run_file: Path) -> None:
    start(tmp_path)
    interrupted_save(tmp_path, 6)
    other_run(tmp_path, None, pid=os.getpid())
    assert clean_up_run(run_file) == CleanupReport() and saved_steps(tmp_path) == {6}


@pytest.mark.parametrize("seamless", [True, False])
def test_a_tracker_cut_while_it_was_written_is_repaired(tmp_path: Path, run_file: Path, seamless: bool) -> None:
    save(tmp_path, 9)
    save(tmp_path, 1)
    start(tmp_path, seamless=seamless)
    interrupted_save(tmp_path, 2, empty_tracker=True)
    assert clean_up_run(run_file) == CleanupReport()
    assert tracker(tmp_path) == "2" and saved_steps(tmp_path) == {1, 2, 9}


@pytest.mark.parametrize("seamless", [True, False])
def test_a_tracker_that_was_empty_before_says_nothing_of_a_new_folder(
    tmp_path: Path, run_file: Path, seamless: bool
) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / "global_step_2" / "data.pt").unlink()
    (tmp_path / "global_step_3" / "actor").mkdir(parents=True)  # verl keeps fewer actors than folders
    (tmp_path / "global_step_3" / "data.pt").touch()
    write_tracker(tmp_path, "")
    start(tmp_path, seamless=seamless)
    interrupted_save(tmp_path, 4, files=True)
    assert clean_up_run(run_file).removed == (tmp_path / "global_step_4",)
    assert tracker(tmp_path) == "1"


def test_an_empty_tracker_with_nothing_whole_stays_empty(tmp_path: Path, run_file: Path) -> None:
    write_tracker(tmp_path, "")
    start(tmp_path)
    interrupted_save(tmp_path, 4)
    assert clean_up_run(run_file).removed and tracker(tmp_path) == ""


def test_asynchronous_saves_are_left_and_their_tracker_names_what_has_a_manifest(
    tmp_path: Path, run_file: Path
) -> None:
    start(tmp_path, async_save=True)
    with marked_save(str(tmp_path), 1):
        save(tmp_path, 1)
    (tmp_path / "global_step_1" / "actor" / "ckpt_contents.json").touch()
    save(tmp_path, 2)
    write_tracker(tmp_path, "")
    assert clean_up_run(run_file) == CleanupReport()
    assert saved_steps(tmp_path) == {1, 2} and tracker(tmp_path) == "1"
    assert not list(tmp_path.glob(".*"))


def test_a_run_that_announced_nothing_or_never_saved_leaves_nothing_to_do(tmp_path: Path, run_file: Path) -> None:
    assert clean_up_run(run_file) == CleanupReport()
    start(tmp_path / "none")
    assert clean_up_run(run_file) == CleanupReport() and not (tmp_path / "none").exists()
    assert json.loads(run_file.read_text())["checkpoints"] == str(tmp_path / "none")


@settings(max_examples=60, deadline=None)
@given(
    old=st.sets(st.integers(1, 19)),
    new=st.sets(st.integers(1, 19)),
    end=st.sampled_from(["whole", "incomplete", "emptied"]),
    seamless=st.booleans(),
)
def test_afterwards_the_tracker_names_the_newest_of_this_run(
    tmp_path_factory: pytest.TempPathFactory, old: set[int], new: set[int], end: str, seamless: bool
) -> None:
    folder = tmp_path_factory.mktemp("c")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RUN_FILE, str(folder / "run.json"))
        for step in sorted(old):
            save(folder, step)
        start(folder, seamless=seamless)
        for step in sorted(new - old)[: None if end == "whole" else -1]:
            with marked_save(str(folder), step):
                save(folder, step)
        if end != "whole" and new - old:
            interrupted_save(folder, max(new - old), empty_tracker=end == "emptied", files=True)
        clean_up_run(folder / "run.json")
    this = sorted(new - old)[: -1 if end == "incomplete" else None]
    assert saved_steps(folder) == old | set(this)
    named = [*sorted(old), *this][-1:]
    if named:  # else nothing was ever saved whole
        assert tracker(folder) == str(named[0])


def test_a_checkpoint_whose_actor_was_removed_is_removed(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        (tmp_path / f"global_step_{step}" / "transfer_queue").mkdir(parents=True)
    for step in (3, 4):
        (tmp_path / f"global_step_{step}" / "actor").mkdir()
    assert remove_emptied(tmp_path, [2, 3, 4, 5]) == [3, 4]
    assert saved_steps(tmp_path) == {1, 3, 4}, "the first is another run's"
