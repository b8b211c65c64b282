"""What a trainer that waits for a batch lacks: it is told once as many groups have ended, and others are ready."""

from __future__ import annotations

import pytest

from seamless_verl.resources.ahead import StalenessBound
from seamless_verl.trainer.replay_buffer import SeamlessReplayBuffer

pytestmark = pytest.mark.integration


def buffer() -> SeamlessReplayBuffer:
    bound = StalenessBound(1, 4)
    arguments = {"trainer_mode": "seamless", "trainer_config": {}, "sampler_kwargs": {}}
    return SeamlessReplayBuffer(bound=bound, update=lambda: 0, wait=lambda: None, **arguments)


def test_a_batch_lacks_what_has_not_ended() -> None:
    made = buffer()
    assert not made._has_enough_samples(3, "train", 4, {"a"})
    assert made.lacking == 3
    assert not made._has_enough_samples(3, "val", 256, set())
    assert made.lacking == 256


def test_one_group_is_waited_for_where_only_the_staleness_bound_holds_training() -> None:
    made = buffer()
    made.pending_keys["train"] = {"late"}
    made.prompt_global_steps["train"] = {"late": 1, "a": 3, "b": 3, "c": 3, "d": 3}
    assert not made._has_enough_samples(3, "train", 4, {"a", "b", "c", "d"})
    assert made.late == ("late",)
    assert made.lacking == 1


def test_groups_that_were_taken_are_ready_no_more() -> None:
    """Their rows stay in the queue until the step ends."""
    made = buffer()
    made.finished_keys["train"] = {"a", "b", "c"}
    made.taken = {"a", "b"}
    made.unwanted = lambda: {"c": "too easy"}
    assert made.finished() == 0
    made.unwanted = dict
    assert made.finished() == 1
