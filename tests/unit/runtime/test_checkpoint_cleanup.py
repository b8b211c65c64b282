"""A stopped or killed run leaves only finished checkpoints, and leaves those of others alone."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoints import save, write_tracker

from seamless_verl.runtime.checkpoint_cleanup import RUN_FILE, Leftovers, announce, discard_partial, refreshing, saving
from seamless_verl.runtime.checkpoint_marker import SILENCE_S, TRACKER, Life, Mark, mark_file, saved_steps

DEAD = 2**22 + 1  # above Linux's largest process id


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(RUN_FILE, str(tmp_path / "run.json"))
    return tmp_path / "run.json"


def tracker(folder: Path) -> str:
    return (folder / TRACKER).read_text()


def start(folder: Path, *, seamless: bool = True, async_save: bool = False) -> None:
    announce(str(folder), seamless=seamless, async_save=async_save)


def cut(folder: Path, step: int, *, empty_tracker: bool = False, files: bool = False) -> None:
    """A save by our trainer that does not come to its end."""
    with pytest.raises(InterruptedError), saving(str(folder), step):
        save(folder, step, finish=False)
        if files:
            (folder / f"global_step_{step}" / "actor" / "weights").touch()
            (folder / f"global_step_{step}" / "data.pt").touch()
        if empty_tracker:
            write_tracker(folder, "")
        raise InterruptedError


def other_run(folder: Path, step: int | None, *, pid: int, host: str | None = None) -> None:
    """Another run's mark, made before anything was saved."""
    Mark("other", step, [], None, host or socket.gethostname(), pid).write(folder)


def elsewhere(life: Life) -> Life:
    return replace(life, system="another boot, or another container")


def test_a_mark_whose_supervisor_lives_is_its_to_settle(tmp_path: Path, run_file: Path) -> None:
    me, dead = Life.of(os.getpid()), Life(DEAD, 1.0, Life.of(os.getpid()).system)
    mark = Mark("other", 6, [], None, socket.gethostname(), DEAD, (dead, me), False)
    save(tmp_path, 6, finish=False)
    mark.write(tmp_path)
    assert announce(str(tmp_path), seamless=True, async_save=False) == Leftovers() and saved_steps(tmp_path) == {6}
    replace(mark, lives=(dead,)).write(tmp_path)
    assert announce(str(tmp_path), seamless=True, async_save=False).removed == (tmp_path / "global_step_6",)


def test_a_mark_from_elsewhere_protects_while_it_is_refreshed(tmp_path: Path, run_file: Path) -> None:
    start(tmp_path)
    cut(tmp_path, 6)
    me = elsewhere(Life.of(os.getpid()))
    Mark("other", 6, [], None, socket.gethostname(), me.pid, (me,), False).write(tmp_path)
    assert discard_partial(run_file) == Leftovers()
    other, now = mark_file(tmp_path, "other"), time.time()
    os.utime(other, (now, now - SILENCE_S - 5))
    start(tmp_path)
    assert saved_steps(tmp_path) == {6} and other.exists()  # left to its host
    save(tmp_path, 5)
    cut(tmp_path, 7)
    os.utime(other, (now, now - SILENCE_S + 30))
    replace(Mark.read(other), step=7).write(tmp_path)
    assert discard_partial(run_file) == Leftovers()
    start(tmp_path)
    cut(tmp_path, 8)
    replace(Mark.read(other), step=8).write(tmp_path)
    os.utime(other, (now, now - SILENCE_S - 5))
    assert discard_partial(run_file).removed == (tmp_path / "global_step_8",)
    assert not list(tmp_path.glob(".clock*"))


def test_a_run_gives_signs_of_life_while_it_saves(tmp_path: Path, run_file: Path) -> None:
    start(tmp_path, seamless=False)
    (mark,) = tmp_path.glob(".saving-*")
    os.utime(mark, (1, 1))
    with refreshing(every=0.01):
        deadline = time.monotonic() + 10
        while mark.stat().st_mtime == 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        mark.unlink()  # as between saves: nothing is made anew
        time.sleep(0.05)
    assert time.monotonic() < deadline and not mark.exists()


def test_an_older_releases_mark_is_read_and_its_folders_are_left(tmp_path: Path, run_file: Path) -> None:
    save(tmp_path, 6, finish=False)
    old = {"run": "old", "step": 6, "steps": [], "tracker": None, "host": socket.gethostname(), "pid": DEAD}
    mark_file(tmp_path, "old").write_text(json.dumps(old))
    assert announce(str(tmp_path), seamless=True, async_save=False) == Leftovers() and saved_steps(tmp_path) == {6}
    assert not mark_file(tmp_path, "old").exists()


def test_a_finished_save_leaves_no_mark_and_an_unsupervised_one_makes_none(
    tmp_path: Path, run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(tmp_path)
    with saving(str(tmp_path), 1):
        assert len(list(tmp_path.glob(".saving-*"))) == 1
        save(tmp_path, 1)
    assert not list(tmp_path.glob(".*")) and discard_partial(run_file) == Leftovers()
    monkeypatch.delenv(RUN_FILE)
    with saving(str(tmp_path), 2):
        assert not list(tmp_path.glob(".*"))


def test_what_was_there_before_stays(tmp_path: Path, run_file: Path) -> None:
    save(tmp_path, 9)
    save(tmp_path, 5)
    save(tmp_path, 7, finish=False)  # an earlier run's, which the user may know about
    start(tmp_path)
    cut(tmp_path, 9)  # anew
    assert discard_partial(run_file) == Leftovers(spoilt=(tmp_path / "global_step_9",))
    cut(tmp_path, 6)
    assert discard_partial(run_file) == Leftovers(removed=(tmp_path / "global_step_6",))
    assert saved_steps(tmp_path) == {5, 7, 9} and tracker(tmp_path) == "5"


@pytest.mark.parametrize("seamless", [True, False])
def test_a_run_that_starts_over_is_not_fooled_by_an_old_tracker(tmp_path: Path, run_file: Path, seamless: bool) -> None:
    save(tmp_path, 50)
    start(tmp_path, seamless=seamless)
    cut(tmp_path, 25)
    assert discard_partial(run_file).removed == (tmp_path / "global_step_25",)


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
    cut(tmp_path, 6)
    other_run(tmp_path, 6, pid=pid, host=host)
    discard_partial(run_file)
    assert saved_steps(tmp_path) == kept and mark_file(tmp_path, "other").exists()


def test_a_run_of_verls_that_may_save_any_step_protects_all(tmp_path: Path, run_file: Path) -> None:
    start(tmp_path)
    cut(tmp_path, 6)
    other_run(tmp_path, None, pid=os.getpid())
    assert discard_partial(run_file) == Leftovers() and saved_steps(tmp_path) == {6}


@pytest.mark.parametrize("seamless", [True, False])
def test_a_tracker_cut_while_it_was_written_is_mended(tmp_path: Path, run_file: Path, seamless: bool) -> None:
    save(tmp_path, 9)
    save(tmp_path, 1)
    start(tmp_path, seamless=seamless)
    cut(tmp_path, 2, empty_tracker=True)
    assert discard_partial(run_file) == Leftovers()
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
    cut(tmp_path, 4, files=True)
    assert discard_partial(run_file).removed == (tmp_path / "global_step_4",)
    assert tracker(tmp_path) == "1"


def test_an_empty_tracker_with_nothing_whole_stays_empty(tmp_path: Path, run_file: Path) -> None:
    write_tracker(tmp_path, "")
    start(tmp_path)
    cut(tmp_path, 4)
    assert discard_partial(run_file).removed and tracker(tmp_path) == ""


def test_asynchronous_saves_are_left_and_their_tracker_names_what_has_a_manifest(
    tmp_path: Path, run_file: Path
) -> None:
    start(tmp_path, async_save=True)
    with saving(str(tmp_path), 1):
        save(tmp_path, 1)
    (tmp_path / "global_step_1" / "actor" / "ckpt_contents.json").touch()
    save(tmp_path, 2)
    write_tracker(tmp_path, "")
    assert discard_partial(run_file) == Leftovers()
    assert saved_steps(tmp_path) == {1, 2} and tracker(tmp_path) == "1"
    assert not list(tmp_path.glob(".*"))


def test_a_run_that_announced_nothing_or_never_saved_leaves_nothing_to_do(tmp_path: Path, run_file: Path) -> None:
    assert discard_partial(run_file) == Leftovers()
    start(tmp_path / "none")
    assert discard_partial(run_file) == Leftovers() and not (tmp_path / "none").exists()
    assert json.loads(run_file.read_text())["checkpoints"] == str(tmp_path / "none")


@settings(max_examples=60, deadline=None)
@given(
    old=st.sets(st.integers(1, 19)),
    new=st.sets(st.integers(1, 19)),
    end=st.sampled_from(["whole", "torn", "emptied"]),
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
            with saving(str(folder), step):
                save(folder, step)
        if end != "whole" and new - old:
            cut(folder, max(new - old), empty_tracker=end == "emptied", files=True)
        discard_partial(folder / "run.json")
    this = sorted(new - old)[: -1 if end == "torn" else None]
    assert saved_steps(folder) == old | set(this)
    named = [*sorted(old), *this][-1:]
    if named:  # else nothing was ever saved whole
        assert tracker(folder) == str(named[0])
