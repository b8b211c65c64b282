"""The line of a step: which figures it has, and which wait it names."""

from __future__ import annotations

import pytest

from seamless_verl.runtime.step_metrics import VALIDATED
from seamless_verl.trainer.step_log import CHECKPOINT, FAILED, UNSCORED, WAITS, chosen_ahead, longest_wait, step_line

STEP = {
    "critic/score/mean": 0.2314,
    "perf/total_num_tokens": 1664,
    "response_length/mean": 4.0,
    "prompt_length/mean": 9.0,
    "perf/time_per_step": 2.0,
    "seamless/device/idle_share": 0.234,
    "training/off_policy/trajectory_staleness_worst/max": 1,
    "timing_s/gen": 0.42,
    "timing_s/update_weights": 0.06,
}


def test_a_step_is_one_line_with_its_figures() -> None:
    line = "step:12 of 80  reward 0.231  256 tokens/s  2.0 s  idle 23%  staleness 1  waited 0.4 s for groups"
    assert step_line(12, 80, STEP) == line


def test_tokens_are_the_responses_and_a_checkpoint_takes_none_of_their_time() -> None:
    """As in a comparison's report: 512 of the 1664 tokens are of responses."""
    assert "512 tokens/s  2.0 s" in step_line(12, 80, STEP | {CHECKPOINT: 1.0})
    assert "tokens/s" not in step_line(12, 80, {"perf/time_per_step": 2.0})


def test_a_validation_before_the_first_step_has_only_its_reward() -> None:
    metrics = {"val-aux/sums/reward/mean@4": 0.125, "val-core/sums/acc/mean@4": 0.9}
    assert step_line(0, 80, metrics) == "step:0 of 80  validation 0.125"
    more = metrics | {"val-core/more/reward/mean@4": 0.375}
    assert step_line(0, 80, more) == "step:0 of 80  validation 0.250", "the mean of both data sources"
    beside = metrics | {VALIDATED: 5.0}
    assert step_line(7, 80, beside) == "step:7 of 80  validation 0.125 (step 5)", "it ran beside training"


def test_what_the_run_chose_is_said_with_its_reason() -> None:
    shares = {"seamless/ahead/lost_share": 0.12, "seamless/ahead/lost_share/fewer": 0.31}
    found = {"seamless/ahead": 2.0, **shares, "seamless/ahead/lost_share/more": 0.09}
    assert "  ahead 2 (engines lost 12%; 9% with 3, 31% with 1)  waited" in step_line(12, 80, STEP | found)
    del found["seamless/ahead/lost_share/fewer"]
    assert chosen_ahead(found | {"seamless/ahead": 1.0}) == ["ahead 1 (engines lost 12%; 9% with 2)"]
    assert chosen_ahead({"seamless/ahead": 2.0}) == [], "it was given"
    nothing = {"seamless/ahead/lost_share": 0.0, "seamless/ahead/lost_share/more": 0.004}
    assert chosen_ahead({"seamless/ahead": 2.0} | nothing) == ["ahead 2"]


@pytest.mark.parametrize("name", WAITS)
def test_the_longest_wait_is_named(name: str) -> None:
    (text,) = longest_wait({**dict.fromkeys(WAITS, 0.5), name: 1.0})
    assert text == f"waited 1.0 s {WAITS[name]}"


def test_a_step_that_hardly_waited_names_no_wait() -> None:
    assert longest_wait({"timing_s/gen": 0.04}) == []


def test_what_was_left_out_is_said_beside_the_figures_that_lack_it() -> None:
    line = step_line(4, 4, {"val-core/x/reward/mean@1": 0.5, UNSCORED: 64.0, FAILED: 512.0})
    assert line == "step:4 of 4  validation 0.500 (64 samples without a score)  512 sessions failed so far"
    kinds = {f"{FAILED}/tool_failed": 8.0, f"{FAILED}/stuck": 0.0, f"{FAILED}/timed_out": 4.0}
    assert (
        step_line(4, 4, {FAILED: 12.0} | kinds) == "step:4 of 4  12 sessions failed so far (8 tool_failed, 4 timed_out)"
    )
