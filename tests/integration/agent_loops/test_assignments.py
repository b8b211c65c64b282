"""Which prompts a dead worker had, and how often one is started again."""

from __future__ import annotations

import pytest
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from seamless_verl.agent_loops.assignments import (
    WINDOW_S,
    Assignments,
    RestartLimit,
    batches_of,
    rows_of_sessions,
    unended_of,
)
from seamless_verl.agent_loops.rows import FIRST

pytestmark = pytest.mark.integration


def batch(*uids: str, validate: bool = False, **columns: list[int]) -> TensorDict:
    made = tu.get_tensordict({"uid": list(uids), "text": [f"text of {uid}" for uid in uids], **columns})
    tu.assign_non_tensor_data(made, "global_steps", 3)
    if validate:
        tu.assign_non_tensor_data(made, "validate", True)
    return made


def test_unended_prompts_of_a_worker_are_given_again_as_they_were() -> None:
    given = Assignments()
    given.add(0, batch("a", "b", "c"))
    given.add(1, batch("d"))
    given.add(0, batch("v", validate=True))
    given.add(0, batch("r", **{FIRST: [4]}))
    lost = given.of_worker(0, {"a", "c", "d", "v", "r"})
    assert list(lost) == ["a", "c", "v", "r"]
    assert [one.partition for one in lost.values()] == ["train", "train", "val", "train"]
    assert [one.first for one in lost.values()] == [0, 0, 0, 4]
    again = batches_of(lost.values())
    assert [list(tu.get(one, "uid")) for one in again] == [["a", "c"], ["v"], ["r"]]
    assert list(tu.get(again[0], "text")) == ["text of a", "text of c"]
    assert tu.get(again[0], "global_steps") == 3 and tu.get(again[1], "validate") is True
    given.forget(["a"])
    given.prune({"c", "d"})
    assert list(given.by_uid) == ["c", "d"]
    given.add(1, batch("c"), {"c": 1})
    assert list(given.of_worker(1, {"c", "d"})) == ["c", "d"] and given.of_worker(0, {"c"}) == {}
    assert [one.deaths for one in given.by_uid.values()] == [1, 0]
    given.add(0, batch("e"))
    given.defer(["d", "e", "unknown"])
    assert list(given.by_uid) == ["c"] and list(given.deferred) == ["d", "e"]
    given.ended(1)
    assert list(given.deferred) == ["e"]


def test_what_has_not_ended_and_which_rows_are_cleared() -> None:
    tags = {
        "a": {"is_prompt": True, "status": "pending"},
        "b": {"is_prompt": True, "status": "running"},
        "c": {"is_prompt": True, "status": "finished"},
        "a_0_0": {"status": "success"},
    }
    assert unended_of(tags) == {"a", "b"}
    keys = ["a", "a_0_0", "a_1_0", "a_10_1", "b_0_0", "r_3_0", "r_4_0", "r_4_1"]
    assert rows_of_sessions(keys, {"a": 0, "r": 4}) == ["a_0_0", "a_1_0", "a_10_1", "r_4_0", "r_4_1"]


def test_a_worker_is_started_again_so_often_within_the_time() -> None:
    now = [0.0]
    limit = RestartLimit(2, now=lambda: now[0])
    assert [limit.take(0), limit.take(0), limit.take(0), limit.take(1)] == [True, True, False, True]
    now[0] = WINDOW_S + 1
    assert limit.take(0) is True
    assert RestartLimit(0).take(0) is False
