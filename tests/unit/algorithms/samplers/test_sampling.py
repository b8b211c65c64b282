"""The sampler's runner: each group is judged once, reopened once, and has one end; its state survives a restart."""

from __future__ import annotations

import json
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.algorithms.samplers import SAMPLERS, EndedGroup, PromptSampling, make_sampler, sampler_named
from seamless_verl.config.schema import SamplerConfig
from seamless_verl.errors import ConfigError, IntegrityError
from seamless_verl.runtime.fields import rows


def sampling(name: str = "dars", samples: int = 4, success: float | None = None) -> PromptSampling:
    return PromptSampling(name, make_sampler(name, {}), samples=samples, success=success)


def ended(uid: str, *rewards: float, prompt: str = "p") -> EndedGroup:
    return EndedGroup(uid, prompt, rewards, len(rewards))


def test_a_group_is_judged_once_and_its_result_counts_once() -> None:
    runs = sampling()
    group = ended("u", 0, 0, 1, 1)
    assert runs.judge([group])["u"].extra == 0
    assert runs.judge([group])["u"].extra == 0, "at the next look at the queue"
    assert [one.samples for one in runs.histories.of("p").groups] == [4]
    assert runs.metrics()["seamless/sampler/judged"] == 1


def test_a_reopened_group_is_trained_with_all_of_its_samples() -> None:
    runs = sampling()
    assert runs.judge([ended("u", 0, 0, 0, 0)])["u"].extra == 6  # S = 7/32: (2 - 7/8) / S = 5.1
    assert runs.reopened["u"].first == 4 and not runs.histories.of("p").groups
    verdict = runs.judge([ended("u", *[0] * 9, 1)])["u"]
    assert verdict.extra == 0 and not verdict.drop and not runs.reopened
    assert [(one.samples, one.total) for one in runs.histories.of("p").groups] == [(10, 1.0)]
    metrics = runs.metrics()
    assert metrics["seamless/sampler/reopened"] == 1 and metrics["seamless/sampler/extra_samples"] == 6
    assert metrics["seamless/sampler/samples_of/hard"] == 10 and metrics["seamless/sampler/pass_rate"] == 0.1
    assert "seamless/sampler/pass_rate" not in runs.metrics(), "of this step there is none"


def test_extra_samples_that_all_fail_do_not_reopen_it_again() -> None:
    runs = sampling()
    runs.judge([ended("u", 0, 0, 0, 1)])
    assert "u" in runs.reopened
    assert runs.judge([ended("u", 0, 0, 0, 1)])["u"].extra == 0
    assert runs.dropped() == {}


def test_what_is_dropped_has_a_reason_until_it_has_left_the_queue() -> None:
    runs = sampling()
    runs.judge([ended("u", 1, 1, 1, 1)])
    assert runs.dropped() == {"u": "all of its 4 samples were right"}
    runs.keep_only({"u"})
    assert "u" in runs.dropped()
    runs.keep_only(set())
    assert runs.dropped() == {} and runs.metrics()["seamless/sampler/dropped"] == 1


def test_groups_that_were_judged_for_good_are_not_judged_again_after_a_resume() -> None:
    runs = sampling()
    runs.judge([ended("hard", 0, 0, 0, 0, prompt="h")])
    ready = [ended("hard", *[0] * 9, 1, prompt="h"), ended("easy", 1, 1, 1, 1, prompt="e")]
    runs.judge(ready)
    resumed = sampling()
    resumed.load_state_dict(json.loads(json.dumps(runs.state_dict())))
    assert resumed.judge(ready) == runs.judge(ready) and not resumed.reopened, "a hard one is not reopened twice"
    assert resumed.histories.groups == runs.histories.groups
    assert resumed.dropped() == {"easy": "all of its 4 samples were right"}
    metrics = resumed.metrics()
    assert [metrics[f"seamless/sampler/{name}"] for name in ("judged", "trained", "dropped")] == [2, 1, 1]


def test_extra_sessions_have_numbers_that_no_session_of_the_group_has() -> None:
    runs = sampling()
    runs.judge([EndedGroup("u", "p", (0, 0, 1), 4)])  # session 1 of four failed
    assert (runs.reopened["u"].first, runs.reopened["u"].next_session) == (3, 4)
    resumed = sampling()
    resumed.load_state_dict(json.loads(json.dumps(runs.state_dict())))
    assert resumed.reopened == runs.reopened


def test_a_reopened_group_that_left_the_queue_is_lost() -> None:
    runs = sampling()
    runs.judge([ended("u", 0, 0, 0, 0)])
    runs.keep_only([])
    assert runs.metrics()["seamless/sampler/lost"] == 1 and not runs.reopened


def test_rewards_out_of_range_are_refused_with_the_setting_that_maps_them() -> None:
    for reward in (1.5, -0.1, float("nan")):
        with pytest.raises(ConfigError, match=r"seamless\.sampler\.success") as error:
            sampling().judge([ended("u", 0.0, reward)])
        assert "Set seamless.sampler.success to the least reward" in error.value.way_out
    runs = sampling(success=1.0)
    runs.judge([ended("u", 0.9, 1.0, 7.0, -3.0)])
    assert runs.histories.of("p").groups[0].total == 2


def test_it_chooses_by_what_it_has_seen() -> None:
    runs = sampling("gdro")
    assert runs.choose(["a", "b"]) == [4, 4]
    runs.judge([ended("u", 1, 1, 1, 1, prompt="a"), ended("v", 0, 0, 0, 0, prompt="b")])
    assert runs.choose(["a", "b"]) == [2, 6]
    metrics = runs.metrics()
    assert (metrics["seamless/sampler/samples/min"], metrics["seamless/sampler/samples/max"]) == (2, 6)


def test_a_lost_count_is_an_integrity_error() -> None:
    runs = sampling()
    runs.judge([ended("u", 0, 1, 1, 1)])
    runs.counts["trained"] -= 1
    with pytest.raises(IntegrityError, match="judged"):
        runs.metrics()


def test_the_settings_name_the_samplers_and_their_options() -> None:
    (names,) = [row.allowed for row in rows(SamplerConfig, "s") if row.key == "s.name"]
    assert names == ", ".join(f"`{name}`" for name in SAMPLERS)
    assert set(SamplerConfig().options) <= {option for kind in SAMPLERS.values() for option in kind.OPTIONS}
    with pytest.raises(ConfigError, match=re.escape(f"Choose one of {sorted(SAMPLERS)}")):
        sampler_named("darts")


@given(st.sampled_from(sorted(SAMPLERS)), st.integers(0, 2**32))
def test_a_restored_run_decides_as_one_that_was_never_stopped(name: str, seed: int) -> None:
    """A thousand and more events in all: prompts are offered, groups end, get more samples, leave the queue."""
    draw, runs = random.Random(seed), sampling(name)
    other, queue, number = sampling(name), dict[str, EndedGroup](), 0
    for _ in range(40):
        restored = sampling(name)
        restored.load_state_dict(json.loads(json.dumps(other.state_dict())))
        other = restored
        prompts = [f"p{draw.randrange(5)}" for _ in range(draw.randrange(4))]
        chosen = runs.choose(prompts)
        assert chosen == other.choose(prompts)
        for prompt, samples in zip(prompts, chosen, strict=True):
            if samples:
                number += 1
                rewards = [float(draw.random() < int(prompt[1]) / 4) for _ in range(samples)]
                queue[f"u{number}"] = EndedGroup(f"u{number}", prompt, tuple(rewards), samples + draw.randrange(3))
        ready = [group for group in queue.values() if draw.random() < 0.7]
        verdicts = runs.judge(ready)
        assert verdicts == other.judge(ready)
        for uid, verdict in verdicts.items():
            rewards = [float(draw.random() < 0.3) for _ in range(verdict.extra)]
            group = queue[uid]
            number_after = group.next_session + verdict.extra
            queue[uid] = EndedGroup(uid, group.prompt, (*group.rewards, *rewards), number_after)
        for uid in [uid for uid in queue if draw.random() < 0.2]:
            del queue[uid]
        runs.keep_only(queue)
        other.keep_only(queue)
        runs.check_integrity()
        other.check_integrity()
        assert runs.reopened == other.reopened and runs.histories.groups == other.histories.groups
        assert runs.final == other.final
