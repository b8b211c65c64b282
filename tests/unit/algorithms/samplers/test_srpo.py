"""Prompts that were learned are left out, for an epoch or for good."""

from __future__ import annotations

import json

import pytest
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


def resumed(sampler: Srpo, threshold: float | None, *, older: bool = False) -> Srpo:
    """One with this threshold, from the checkpoint of another; an `older` one lacks what it did not have."""
    state = json.loads(json.dumps(sampler.state_dict()))
    if older:
        del state["for_good"]
    made = Srpo(threshold=threshold)
    made.load_state_dict(state)
    return made


@pytest.mark.parametrize("older", [False, True])
def test_what_was_left_out_once_comes_back_in_a_run_with_a_threshold(older: bool) -> None:
    srpo = Srpo()
    assert offered(srpo, history("a", 10), history("b", 10)) == (0, 0)
    bounded = resumed(srpo, 0.9, older=older)
    assert offered(bounded, history("a", 10, 3), history("b", 10, 9)) == (8, 0), "a was forgotten, b was not"
    assert offered(bounded, history("a", 10, 3), history("b", 10, 9)) == (8, 0)


def test_a_threshold_that_is_raised_or_removed_brings_prompts_back() -> None:
    srpo = Srpo(threshold=0.5)
    assert offered(srpo, history("a", 6), history("b", 9)) == (0, 0)
    raised = resumed(srpo, 0.9)
    assert offered(raised, history("a", 6), history("b", 9), history("b", 9, 3)) == (8, 0, 0)
    removed = resumed(srpo, None)
    assert offered(removed, history("b", 9)) == (8,)
    assert offered(resumed(removed, 0.9), history("b", 9, 3)) == (8,), "it was offered again, and forgotten"


def test_an_older_checkpoint_of_a_run_with_a_threshold_loads() -> None:
    srpo = Srpo(threshold=0.9)
    assert offered(srpo, history("a", 9), history("b", 8)) == (0, 8)
    assert offered(resumed(srpo, 0.9, older=True), history("a", 9), history("b", 8)) == (0, 8)


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
