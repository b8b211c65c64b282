"""Verl's modes with a shorter poll, and that a report says where the one they are shipped with weighs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.comparison import finished, frontier, logged

from seamless_verl.errors import ConfigError
from seamless_verl.tools.compare.arms import parse_arm, with_short_poll
from seamless_verl.tools.compare.page import explanations
from seamless_verl.tools.compare.plan import Options, check_arms
from seamless_verl.tools.compare.report import poll_line

BUFFER = "trainer.v1.sampler.custom_sampler"


def test_verls_modes_get_verls_buffer_with_a_shorter_poll() -> None:
    sync, colocated = (with_short_poll(parse_arm(text)) for text in ("sync:data.seed=3", "colocate_async"))
    assert (sync.name, sync.mode) == ("sync:data.seed=3 poll=0.1", "sync")
    assert sync.settings == (
        "data.seed=3",
        f"{BUFFER}.path=pkg://seamless_verl.tools.compare.polling",
        f"{BUFFER}.name=PollingReplayBuffer",
    )
    assert colocated.settings[-1] == f"{BUFFER}.name=PollingReplayBufferAsync"


def test_ours_and_a_buffer_of_ones_own_stay() -> None:
    for text in ("seamless", f"sync:{BUFFER}.path=own.py:{BUFFER}.name=Own"):
        assert with_short_poll(parse_arm(text)) == parse_arm(text)


def test_short_steps_of_verls_modes_are_named() -> None:
    one = frontier()
    assert poll_line(one).startswith(
        "sync, colocate_async: verl looks for finished prompts every 2 s, and a step takes"
    )
    assert poll_line(one) in explanations(one)


def test_steps_in_which_it_weighs_little_are_not_named() -> None:
    assert poll_line(replace(frontier(), arms={})) == "", "nothing is known of them"
    steps = {"sync": 100.0, "colocate_async": 2.0}
    runs = [finished(arm, 1, logged(12, seconds=seconds)) for arm, seconds in steps.items()]
    one = replace(frontier(), runs=tuple(runs))
    assert poll_line(one).startswith("colocate_async: ")
    assert poll_line(replace(one, runs=tuple(runs[:1]))) == "" and "" not in explanations(one)


def test_a_shorter_poll_is_not_named() -> None:
    one = frontier()
    arms = {name: replace(facts, shipped_poll=False) for name, facts in one.arms.items()}
    assert poll_line(replace(one, arms=arms)) == ""


def test_the_option_needs_a_mode_of_verls() -> None:
    with pytest.raises(ConfigError, match=r"--arms=.*--short-poll is for verl's modes"):
        check_arms([parse_arm("seamless")], Options(short_poll=True))
    check_arms([parse_arm("sync"), parse_arm("seamless")], Options(short_poll=True))
