"""The arms of a comparison: how they are written, which devices they have, and over what they are repeated."""

from __future__ import annotations

import pytest

from seamless_verl.errors import ConfigError
from seamless_verl.tools.compare.arms import (
    ComparedArm,
    JobFacts,
    Machines,
    arm_overrides,
    folder_name,
    parse_arm,
    parse_arms,
    repeated,
    with_short_poll,
)
from seamless_verl.tools.compare.command import parse_bounds, parse_rates

SAMPLER = "trainer.v1.sampler.custom_sampler"
TWO_CORES = JobFacts(Machines(1, 2), batch=16, mini_batch=4, pool_backend="gloo")


def values(arm: ComparedArm, facts: JobFacts = TWO_CORES) -> dict[str, str]:
    return dict(text.split("=", 1) for text in arm_overrides(arm, facts))


@pytest.mark.parametrize(
    ("text", "arm"),
    [
        ("sync", ComparedArm("sync", "sync", "sync")),
        ("far:seamless.ahead=1", ComparedArm("far:seamless.ahead=1", "far", "seamless", ("seamless.ahead=1",))),
        (
            "sync:reward.url=http://host:80/a:+new.key=1",
            ComparedArm(
                "sync:reward.url=http://host:80/a:+new.key=1",
                "sync:reward.url=http://host:80/a:+new.key=1",
                "sync",
                ("reward.url=http://host:80/a", "+new.key=1"),
            ),
        ),
    ],
)
def test_an_arm_is_a_mode_or_a_name_with_settings(text: str, arm: ComparedArm) -> None:
    assert parse_arm(text) == arm


@pytest.mark.parametrize("text", ["synk", "seamless:ahead", "", "sync,sync", "far:trainer.device=cpu", "far", "sync,"])
def test_another_text_is_refused_with_how_to_write_it(text: str) -> None:
    with pytest.raises(ConfigError, match="--arms"):
        parse_arms(text)


def test_a_comma_within_brackets_separates_no_arms() -> None:
    first, second = parse_arms("seamless:seamless.gateway.options=[--a,--b],sync")
    assert first.settings == ("seamless.gateway.options=[--a,--b]",) and second.name == "sync"


def test_every_arm_has_all_devices() -> None:
    shared = {"trainer.nnodes": "1", "trainer.n_gpus_per_node": "2"}
    for mode in ("sync", "colocate_async", "seamless"):
        found = values(parse_arm(mode))
        assert found.items() >= shared.items() and found["actor_rollout_ref.rollout.nnodes"] == "0"
    separate = values(parse_arm("separate_async"))
    assert (separate["trainer.n_gpus_per_node"], separate["actor_rollout_ref.rollout.n_gpus_per_node"]) == ("1", "1")
    assert separate["trainer.v1.separate_async.parameter_sync_step"] == "4"  # as many optimizer steps as the others
    assert separate["actor_rollout_ref.rollout.checkpoint_engine.backend"] == "gloo"


@pytest.mark.parametrize(("count", "devices", "train", "rollout"), [(1, 5, (1, 3), (1, 2)), (4, 8, (2, 8), (2, 8))])
def test_separate_devices_are_half_of_one_machine_or_half_of_the_machines(
    count: int, devices: int, train: tuple[int, int], rollout: tuple[int, int]
) -> None:
    facts = JobFacts(Machines(count, devices), 64, 16, "nccl")
    found = values(parse_arm("separate_async"), facts)
    assert (int(found["trainer.nnodes"]), int(found["trainer.n_gpus_per_node"])) == train
    pool = "actor_rollout_ref.rollout"
    assert (int(found[f"{pool}.nnodes"]), int(found[f"{pool}.n_gpus_per_node"])) == rollout


def test_what_separate_async_cannot_do_is_refused_by_key() -> None:
    one = JobFacts(Machines(1, 1), 16, 4, "gloo")
    with pytest.raises(ConfigError, match="--devices=1: separate_async trains and generates on devices of their own"):
        arm_overrides(parse_arm("separate_async"), one)
    uneven = JobFacts(Machines(1, 2), 16, 5, "gloo")
    with pytest.raises(ConfigError, match=r"ppo_mini_batch_size=5: does not divide data\.train_batch_size=16"):
        arm_overrides(parse_arm("separate_async"), uneven)


def test_ours_keeps_a_layout_of_its_own_and_the_settings_of_an_arm_come_last() -> None:
    own = JobFacts(Machines(1, 2), 16, 4, "gloo", own_layout=True)
    assert arm_overrides(parse_arm("seamless:seamless.ahead=2"), own) == [
        "trainer.v1.trainer_mode=seamless",
        "seamless.ahead=2",
    ]
    assert arm_overrides(parse_arm("sync:trainer.n_gpus_per_node=1"), TWO_CORES)[-1] == "trainer.n_gpus_per_node=1"


def test_tags_are_taken_from_verls_modes_which_do_not_read_them() -> None:
    tagged = JobFacts(Machines(2, 8), 64, 16, "nccl", by_tags=True)
    assert values(parse_arm("sync"), tagged)["seamless.resources"] == "null"
    assert values(parse_arm("seamless"), tagged) == {"trainer.v1.trainer_mode": "seamless"}


def test_an_arm_of_many_settings_has_a_folder_that_a_file_system_takes() -> None:
    arms = [f"seamless:{'data.seed=1:' * 40}seamless.ahead={ahead}" for ahead in (1, 2)]
    names = [folder_name(arm) for arm in arms]
    assert names[0] != names[1] and all(len(f"{name}-seed100-r10") <= 255 for name in names)


LR = "actor_rollout_ref.actor.optim.lr"


def test_only_arms_of_ours_without_a_bound_of_their_own_are_repeated_over_bounds() -> None:
    arms = repeated(parse_arms("sync,seamless,far:max_staleness=9:ahead=2,near:ahead=1"), [0, 4], [])
    assert [arm.name for arm in arms] == ["sync", "seamless s=0", "seamless s=4", "far", "near s=0", "near s=4"]
    assert arms[2].settings == ("seamless.max_staleness=4",)
    assert arms[3].settings == ("seamless.max_staleness=9", "seamless.ahead=2")
    assert arms[5].settings == ("seamless.ahead=1", "seamless.max_staleness=4")
    assert [arm.line for arm in arms] == ["", "seamless", "seamless", "", "near", "near"]


def test_every_arm_is_repeated_over_learning_rates_those_of_one_together() -> None:
    arms = repeated(parse_arms("sync,seamless"), [1], ["5e-4", "1e-3"])
    assert [arm.name for arm in arms] == [
        "sync lr=5e-4",
        "seamless s=1 lr=5e-4",
        "sync lr=1e-3",
        "seamless s=1 lr=1e-3",
    ]
    assert arms[3].settings == ("seamless.max_staleness=1", f"{LR}=1e-3")
    assert [(arm.rate, arm.system) for arm in arms[2:]] == [("1e-3", "sync"), ("1e-3", "seamless s=1")]
    assert arms[3].line == "seamless lr=1e-3"


def test_a_repeated_arm_can_be_written_again() -> None:
    (arm,) = repeated(parse_arms("seamless"), [4], ["1e-3"])
    (again,) = parse_arms(arm.text)
    assert again.settings == arm.settings


@pytest.mark.parametrize(
    ("arms", "bounds", "rates", "reason"),
    [
        ("sync,colocate_async", [1], [], "--staleness=.*no arm takes it"),
        ("sync,seamless:max_staleness=1", [1], [], "--staleness=.*no arm takes it"),
        (f"sync,sync:{LR}=1e-4", [], ["1e-3"], "--learning-rates=.*sets actor_rollout_ref"),
        ("a:ahead=1,a:ahead=2", [1], [], "--arms"),
    ],
)
def test_what_cannot_be_repeated_is_refused(arms: str, bounds: list[int], rates: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        repeated(parse_arms(arms), bounds, rates)


@pytest.mark.parametrize("text", ["", "a", "0,-1", "1,01", "1.5"])
def test_bounds_are_whole_numbers_each_once(text: str) -> None:
    assert parse_bounds("0,1,20") == (0, 1, 20)
    with pytest.raises(ConfigError, match="--staleness"):
        parse_bounds(text)


@pytest.mark.parametrize("text", ["", "a", "0", "-1e-3", "nan", "inf", "1e-3,0.001"])
def test_learning_rates_are_numbers_above_0_each_once(text: str) -> None:
    assert parse_rates("5e-4,1e-3") == ("5e-4", "1e-3")
    with pytest.raises(ConfigError, match="--learning-rates"):
        parse_rates(text)


def test_verls_modes_get_verls_buffer_with_a_shorter_poll() -> None:
    sync, colocated = (with_short_poll(parse_arm(text)) for text in ("sync:data.seed=3", "colocate_async"))
    assert (sync.name, sync.mode) == ("sync:data.seed=3 poll=0.1", "sync")
    assert sync.settings == (
        "data.seed=3",
        f"{SAMPLER}.path=pkg://seamless_verl.tools.compare.polling",
        f"{SAMPLER}.name=PollingReplayBuffer",
    )
    assert colocated.settings[-1] == f"{SAMPLER}.name=PollingReplayBufferAsync"


def test_ours_and_a_buffer_of_ones_own_stay() -> None:
    for text in ("seamless", f"sync:{SAMPLER}.path=own.py:{SAMPLER}.name=Own"):
        assert with_short_poll(parse_arm(text)) == parse_arm(text)
