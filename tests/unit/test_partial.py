"""A stopped run leaves only finished checkpoints."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from seamless_verl.trainer.partial import TRACKER, CheckpointsBefore, saved_steps


def save(folder: Path, step: int, *, finish: bool = True) -> None:
    (folder / f"global_step_{step}" / "actor").mkdir(parents=True)
    if finish:
        (folder / TRACKER).write_text(str(step))


def test_what_this_run_left_unfinished_goes_and_nothing_else(tmp_path: Path) -> None:
    save(tmp_path, 5)
    save(tmp_path, 9, finish=False)  # an earlier run's, which the user may know about
    before = CheckpointsBefore.of(str(tmp_path))
    save(tmp_path, 6)
    save(tmp_path, 7, finish=False)
    assert before.discard_partial() == [tmp_path / "global_step_7"]
    assert saved_steps(tmp_path) == {5, 6, 9}


def test_a_first_save_that_was_cut_goes(tmp_path: Path) -> None:
    before = CheckpointsBefore.of(str(tmp_path / "none"))
    save(tmp_path / "none", 1, finish=False)
    assert before.discard_partial() and saved_steps(tmp_path / "none") == set()


def test_a_tracker_cut_while_it_was_written_is_mended(tmp_path: Path) -> None:
    save(tmp_path, 1)
    before = CheckpointsBefore.of(str(tmp_path))
    save(tmp_path, 2)
    (tmp_path / TRACKER).write_text("")
    assert before.discard_partial() == []
    assert (tmp_path / TRACKER).read_text() == "2"


@settings(max_examples=50)
@given(old=st.sets(st.integers(1, 9)), new=st.lists(st.integers(10, 19), unique=True), cut=st.booleans())
def test_afterwards_the_tracker_names_the_newest_of_this_run(
    tmp_path_factory: object, old: set[int], new: list[int], cut: bool
) -> None:
    folder = tmp_path_factory.mktemp("c")  # type: ignore[attr-defined]
    for step in sorted(old):
        save(folder, step)
    before = CheckpointsBefore.of(str(folder))
    for i, step in enumerate(sorted(new)):
        save(folder, step, finish=not (cut and i == len(new) - 1))
    before.discard_partial()
    kept = saved_steps(folder)
    assert old <= kept
    assert not kept or int((folder / TRACKER).read_text()) == max(kept)
