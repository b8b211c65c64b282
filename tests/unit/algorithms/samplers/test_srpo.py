"""Prompts that were learned are left out, for an epoch or for good."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.algorithms.samplers import GroupResult, PromptHistory, SamplingView
from seamless_verl.algorithms.samplers.srpo import Srpo


def history(prompt: str, *right_of_10: int) -> PromptHistory:
    return PromptHistory(prompt, tuple(GroupResult.of([1.0] * n + [0.0] * (10 - n)) for n in right_of_10))


def offered(sampler: Srpo, *histories: PromptHistory) -> tuple[int, ...]:
    return sampler.decide(SamplingView(8, histories)).samples


def test_all_right_is_left_out_of_the_next_epoch_alone() -> None:
    srpo = Srpo()
    assert offered(srpo, history("a", 10), history("b", 9), history("c", 0), history("new")) == (0, 8, 8, 8)
    assert offered(srpo, history("a", 10)) == (8,), "the epoch after that"
    assert offered(srpo, history("a", 10, 10)) == (0,), "it is still right"
    assert offered(srpo, history("a", 10, 10)) == (8,)
    assert offered(srpo, history("a", 10, 10, 9)) == (8,), "it was forgotten"


def test_with_a_threshold_it_is_left_out_for_good() -> None:
    srpo = Srpo(threshold=0.9)
    assert offered(srpo, history("a", 9), history("b", 8), history("c", 0)) == (0, 8, 8)
    assert [offered(srpo, history("a", 9)) for _ in range(3)] == [(0,)] * 3
    assert offered(srpo, history("a", 9, 3)) == (0,), "of a group that still ran"


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 10), max_size=3)), max_size=20), st.booleans()
)
def test_a_restored_one_decides_as_one_that_was_never_stopped(
    visits: list[tuple[str, list[int]]], bounded: bool
) -> None:
    threshold = 0.9 if bounded else None
    running, restored = Srpo(threshold=threshold), Srpo(threshold=threshold)
    for prompt, right in visits:
        restarted = Srpo(threshold=threshold)
        restarted.load_state_dict(json.loads(json.dumps(restored.state_dict())))
        restored = restarted
        assert offered(running, history(prompt, *right)) == offered(restored, history(prompt, *right))
    assert running.metrics() == restored.metrics()
