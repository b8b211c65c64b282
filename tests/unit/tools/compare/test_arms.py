"""The arms of a comparison: how they are written, which devices they have, and in which order they run."""

from __future__ import annotations

import pytest

from seamless_verl.errors import ConfigError
from seamless_verl.tools.compare.arms import (
    ComparedArm,
    JobFacts,
    Machines,
    arm_overrides,
    folder_name,
    interleaved,
    parse_arm,
    parse_arms,
)

TWO_CORES = JobFacts(Machines(1, 2, accelerator=False), batch=16, mini_batch=4, pool_backend="gloo")


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


def test_an_arm_may_have_code_of_its_own() -> None:
    sampler = "trainer.v1.sampler.custom_sampler"
    arm = parse_arm(f"sync:{sampler}.path=pkg://seamless_verl.tools.compare.polling:{sampler}.name=PollingReplayBuffer")
    assert arm.settings == (
        f"{sampler}.path=pkg://seamless_verl.tools.compare.polling",
        f"{sampler}.name=PollingReplayBuffer",
    )


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
    facts = JobFacts(Machines(count, devices, accelerator=True), 64, 16, "nccl")
    found = values(parse_arm("separate_async"), facts)
    assert (int(found["trainer.nnodes"]), int(found["trainer.n_gpus_per_node"])) == train
    pool = "actor_rollout_ref.rollout"
    assert (int(found[f"{pool}.nnodes"]), int(found[f"{pool}.n_gpus_per_node"])) == rollout


def test_what_separate_async_cannot_do_is_refused_by_key() -> None:
    one = JobFacts(Machines(1, 1, accelerator=False), 16, 4, "gloo")
    with pytest.raises(ConfigError, match="--devices=1: separate_async trains and generates on devices of their own"):
        arm_overrides(parse_arm("separate_async"), one)
    uneven = JobFacts(Machines(1, 2, accelerator=False), 16, 5, "gloo")
    with pytest.raises(ConfigError, match=r"ppo_mini_batch_size=5: does not divide data\.train_batch_size=16"):
        arm_overrides(parse_arm("separate_async"), uneven)


def test_ours_keeps_a_layout_of_its_own_and_the_settings_of_an_arm_come_last() -> None:
    own = JobFacts(Machines(1, 2, accelerator=False), 16, 4, "gloo", own_layout=True)
    assert arm_overrides(parse_arm("seamless:seamless.ahead=2"), own) == [
        "trainer.v1.trainer_mode=seamless",
        "seamless.ahead=2",
    ]
    assert arm_overrides(parse_arm("sync:trainer.n_gpus_per_node=1"), TWO_CORES)[-1] == "trainer.n_gpus_per_node=1"


def test_tags_are_taken_from_verls_modes_which_do_not_read_them() -> None:
    tagged = JobFacts(Machines(2, 8, accelerator=True), 64, 16, "nccl", by_tags=True)
    assert values(parse_arm("sync"), tagged)["seamless.resources"] == "null"
    assert values(parse_arm("seamless"), tagged) == {"trainer.v1.trainer_mode": "seamless"}


def test_no_arm_always_comes_first() -> None:
    assert list(interleaved("abc", 3)) == [
        (1, "a"),
        (1, "b"),
        (1, "c"),
        *[(2, x) for x in "cba"],
        *[(3, x) for x in "abc"],
    ]


def test_an_arm_of_many_settings_has_a_folder_that_a_file_system_takes() -> None:
    arms = [f"seamless:{'data.seed=1:' * 40}seamless.ahead={ahead}" for ahead in (1, 2)]
    names = [folder_name(arm) for arm in arms]
    assert names[0] != names[1] and all(len(f"{name}-seed100-r10") <= 255 for name in names)
