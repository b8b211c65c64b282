"""The file of a run's sample lengths: which prompt is which, and what of the groups is written when."""

from __future__ import annotations

import json
from pathlib import Path

from seamless_verl.runtime.sample_lengths import LengthRecord, RecordedLengths


def tags(**lengths: int) -> dict[str, dict[str, int]]:
    """Rows by key, where `a_0_1` is the second row of prompt a's first session."""
    return {key: {"response_len": length} for key, length in lengths.items()}


def test_a_session_is_as_long_as_its_rows_and_a_group_is_written_once(tmp_path: Path) -> None:
    file = LengthRecord.beside(str(tmp_path / "checkpoints"))
    file.begin(["a", "b", "c"])
    rows = {**tags(a_0_0=3, a_0_1=4, a_1_0=5, b_0_0=9), "c_0_0": {}}  # c's is being written
    file.groups_ended(rows, ["a", "b"])
    file.groups_ended(rows, ["a", "b"])
    file.write(1, ["b"])
    file.groups_ended(rows, ["a"])
    file.write(2, ["a"])
    lines = (tmp_path / "checkpoints" / "lengths.jsonl").read_text().splitlines()
    assert list(map(json.loads, lines)) == [
        {"step": 1, "begun": 3, "lengths": {"0": [7, 5], "1": [9]}, "trained": [1]},
        {"step": 2, "begun": 3, "lengths": {}, "trained": [0]},
    ]


def test_a_prompt_that_begins_again_keeps_its_place(tmp_path: Path) -> None:
    file = LengthRecord(tmp_path / "l.jsonl")
    file.begin(["a", "b"])
    file.begin_again({"a": "a again", "never begun": "x"})
    file.begin(["a again", "c"])
    file.groups_ended(tags(**{"a again_0_0": 8, "c_0_0": 2}), ["a again", "c"])
    file.write(1, ["a again"])
    found = RecordedLengths.read(file.path)
    assert found == RecordedLengths(begun=3, lengths={0: (8,), 2: (2,)}, trained=(0,))


def test_a_group_that_ran_again_has_its_later_lengths(tmp_path: Path) -> None:
    file = LengthRecord(tmp_path / "l.jsonl")
    for step, rows in enumerate((tags(a_0_0=3), tags(a_0_0=3, a_1_0=4)), 1):
        file.groups_ended(rows, ["a"])
        file.write(step, [])
    found = RecordedLengths.read(file.path)
    assert found is not None and found.lengths == {0: (3, 4)} and found.trained == ()


def test_a_new_start_begins_the_file_anew_and_half_a_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "l.jsonl"
    assert RecordedLengths.read(path) is None
    path.write_text("of another run\n")
    file = LengthRecord(path)
    assert RecordedLengths.read(path) is None
    file.write(1, [])
    with path.open("a") as partly:
        partly.write('{"step": 2, "be')  # the run was killed while it wrote
    assert RecordedLengths.read(path) == RecordedLengths(0, {}, ())


def test_a_long_run_keeps_only_what_is_under_way(tmp_path: Path) -> None:
    """Of ten prompts of each step one is dropped after it ended, one fails, and one begins again in the next step."""
    file = LengthRecord(tmp_path / "l.jsonl")
    deferred, places, trained = list[str](), dict[str, int](), list[int]()
    for step in range(1000):
        fresh = [f"{step}-{number}" for number in range(10)]
        file.begin(fresh)
        again = {uid: f"{uid}-again" for uid in deferred}
        places |= {uid: 10 * step + number for number, uid in enumerate(fresh)}
        places |= {again[uid]: places[uid] for uid in deferred}
        file.begin_again(again)
        ended = [*again.values(), *fresh[:-1]]
        stale, failed, deferred = fresh[0], fresh[-1], fresh[1:2]
        taken = [uid for uid in ended if uid not in (stale, *deferred)]
        file.groups_ended(tags(**{f"{uid}_0_0": step for uid in ended}), ended)
        file.write(step, taken, [stale, failed])
        trained += sorted(places[uid] for uid in taken)
        assert len(file._places) == len(file._written) == len(deferred) == 1 and not file._ended
    found = RecordedLengths.read(file.path)
    assert found is not None and (found.begun, found.trained) == (10_000, tuple(trained))
    assert len(found.lengths) == 9_000 and found.lengths[0] == (0,) and found.lengths[1] == (1,), "its later length"
