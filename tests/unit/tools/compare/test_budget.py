"""What all arms must have alike, what an arm has otherwise, and what else is read from a composed config."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from seamless_verl.errors import ConfigError
from seamless_verl.tools.compare.arms import POLLING, arm_overrides, parse_arm
from seamless_verl.tools.compare.budget import (
    KEYS,
    Difference,
    budget_of,
    check_same_budget,
    differences,
    facts_of,
    machines_of,
    permitted,
    select,
    step_size,
)
from seamless_verl.tools.compare.figures import StepSize

JOB: dict[str, Any] = {
    "data": {"train_files": "a.parquet", "train_batch_size": 16, "seed": 1},
    "actor_rollout_ref": {
        "model": {"path": "model"},
        "actor": {"ppo_mini_batch_size": 4, "ppo_epochs": 1, "optim": {"lr": 1e-3}},
        "rollout": {"n": 8, "nnodes": 0, "n_gpus_per_node": 8, "checkpoint_engine": {"backend": "naive"}},
    },
    "trainer": {
        "nnodes": 1,
        "n_gpus_per_node": 2,
        "device": "cpu",
        "total_training_steps": 20,
        "v1": {"trainer_mode": "sync"},
    },
    "seamless": {"layout": "auto", "resources": None},
}


def changed(key: str, value: Any) -> dict[str, Any]:
    tree = deepcopy(JOB)
    *parents, last = key.split(".")
    node = tree
    for parent in parents:
        node = node.setdefault(parent, {})
    node[last] = value
    return tree


@pytest.mark.parametrize("key", KEYS)
def test_an_arm_with_another_budget_is_refused_by_its_key(key: str) -> None:
    other = changed(key, "another")
    if key in ("data.train_batch_size", "actor_rollout_ref.rollout.n"):
        other = changed(key, 3)
    with pytest.raises(ConfigError, match=rf"{key}=('another'|3): arm ours differs from sync, which has"):
        check_same_budget({"sync": budget_of(JOB), "ours": budget_of(other)})


def test_every_key_that_differs_is_named_and_equal_budgets_pass() -> None:
    check_same_budget({"sync": budget_of(JOB), "ours": budget_of(deepcopy(JOB))})
    other = changed("data.seed", 2)
    other["trainer"]["total_training_steps"] = 30
    with pytest.raises(ConfigError) as error:
        check_same_budget({"sync": budget_of(JOB), "ours": budget_of(other)})
    assert [mistake.key for mistake in error.value.mistakes] == ["data.seed", "trainer.total_training_steps"]


def test_devices_of_trainer_and_pool_count_together() -> None:
    separate = changed("actor_rollout_ref.rollout.nnodes", 1)
    separate["actor_rollout_ref"]["rollout"]["n_gpus_per_node"] = 1
    separate["trainer"] |= {"n_gpus_per_node": 1, "v1": {"trainer_mode": "separate_async"}}
    check_same_budget({"sync": budget_of(JOB), "separate_async": budget_of(separate)})
    with pytest.raises(ConfigError, match="devices=1: arm one differs from sync, which has 2"):
        check_same_budget({"sync": budget_of(JOB), "one": budget_of(changed("trainer.n_gpus_per_node", 1))})


def test_what_a_step_is() -> None:
    assert step_size(JOB) == StepSize(samples=128, group=8, updates=4)
    assert step_size(changed("actor_rollout_ref.actor.ppo_epochs", 2)).updates == 8
    assert select(JOB, "trainer.no.such.key") is None


@pytest.mark.parametrize(
    ("own", "given", "on_machine", "splits", "expected"),
    [(1, None, 2, True, 2), (1, None, 1, True, 1), (1, None, 2, False, 1), (2, None, 8, True, 2), (1, 4, 2, True, 4)],
)
def test_a_job_of_one_device_gets_a_second_one_where_an_arm_needs_two(
    own: int, given: int | None, on_machine: int, splits: bool, expected: int
) -> None:
    tree = changed("trainer.n_gpus_per_node", own)
    facts = facts_of(tree, devices=given, on_machine=on_machine, splits=splits)
    assert facts.machines.total == expected and facts.pool_backend == "gloo"


def apart(devices: int) -> dict[str, Any]:
    """A disaggregated job: a machine that trains and one that generates, as many devices each."""
    tree = changed("actor_rollout_ref.rollout.nnodes", 1)
    tree["actor_rollout_ref"]["rollout"]["n_gpus_per_node"] = devices
    tree["trainer"] |= {"n_gpus_per_node": devices, "device": "cuda", "v1": {"trainer_mode": "separate_async"}}
    return tree


@pytest.mark.parametrize(
    ("gpus", "machines"), [(8, (2, 8)), (None, (2, 8)), (16, (1, 16))], ids=["two machines", "not known", "one machine"]
)
def test_trainer_and_pool_on_two_machines_are_no_machine_with_all_devices(
    gpus: int | None, machines: tuple[int, int]
) -> None:
    facts = facts_of(apart(8), devices=None, on_machine=None, splits=True, gpus=gpus)
    assert (facts.machines.count, facts.machines.devices) == machines and facts.own_layout
    given = facts_of(apart(8), devices=4, on_machine=None, splits=True, gpus=gpus)
    assert (given.machines.count, given.machines.devices) == (1, 4), "they are the user's"


def test_sync_gets_both_machines_of_a_disaggregated_job() -> None:
    facts = facts_of(apart(8), devices=None, on_machine=None, splits=True, gpus=8)
    assert {"trainer.nnodes=2", "trainer.n_gpus_per_node=8"} <= set(arm_overrides(parse_arm("sync"), facts))
    uneven = apart(8)
    uneven["actor_rollout_ref"]["rollout"]["n_gpus_per_node"] = 4
    assert facts_of(uneven, devices=None, on_machine=None, splits=True, gpus=8).machines.total == 12


@pytest.mark.parametrize(
    ("key", "value", "machines"),
    [
        ("trainer.nnodes", 2, 2),
        ("seamless.resources", [{"count": 1, "devices": 8}, {"count": 3, "devices": 8}], 3),
        ("actor_rollout_ref.rollout.nnodes", 2, 1),
    ],
)
def test_machines_are_those_that_the_settings_say(key: str, value: Any, machines: int) -> None:
    """sync has no pool, whatever its fields say."""
    assert machines_of(changed(key, value)) == machines and machines_of(JOB) == 1


def test_given_devices_and_tags_exclude_each_other() -> None:
    tree = changed("seamless.resources", [{"count": 1, "devices": 2, "tags": ["train", "rollout"]}])
    assert facts_of(tree, devices=None, on_machine=None, splits=True).by_tags
    with pytest.raises(ConfigError, match=r"--devices=4: seamless\.resources describes the machines"):
        facts_of(tree, devices=4, on_machine=None, splits=True)


def config(mode: str, loss: str = "vanilla", **seamless: Any) -> dict[str, Any]:
    actor = {"policy_loss": {"loss_mode": loss}, "clip_ratio": 0.2 if loss == "vanilla" else 0.15}
    trainer = {"v1": {"trainer_mode": mode}, "default_local_dir": f"/out/{mode}", "experiment_name": mode}
    return {
        "actor_rollout_ref": {"actor": actor},
        "data": {"seed": len(mode)},
        "trainer": trainer,
        "seamless": {"max_staleness": None, "ahead": None, "weights": {"kv": "recompute"}} | seamless,
    }


def test_the_loss_and_the_bound_come_first_and_places_and_names_are_no_settings() -> None:
    found = differences(config("seamless", "dppo_tv", max_staleness=4, ahead=2), config("sync"))
    assert found == (
        Difference("trainer.v1.trainer_mode", "seamless", "sync"),
        Difference("actor_rollout_ref.actor.policy_loss.loss_mode", "dppo_tv", "vanilla"),
        Difference("seamless.max_staleness", "4", "not read"),
        Difference("actor_rollout_ref.actor.clip_ratio", "0.15", "0.2"),
        Difference("seamless.ahead", "2", "not read"),
    )


def test_beside_verls_mode_ours_has_its_bound_also_where_it_is_the_default() -> None:
    mode, bound = differences(config("seamless"), config("sync"))
    assert (mode.key, bound) == ("trainer.v1.trainer_mode", Difference("seamless.max_staleness", "null", "not read"))
    assert differences(config("sync"), config("seamless"))[1] == Difference(
        "seamless.max_staleness", "not read", "null"
    )


def test_verls_modes_do_not_differ_by_what_neither_reads() -> None:
    (mode,) = differences(config("colocate_async", max_staleness=4), config("sync"))
    assert mode.key == "trainer.v1.trainer_mode"


def test_two_arms_of_ours_differ_by_what_was_given_also_if_it_is_a_default() -> None:
    kept = config("seamless", max_staleness=4, weights={"kv": "keep"})
    assert differences(config("seamless"), kept) == (
        Difference("seamless.max_staleness", "null", "4"),
        Difference("seamless.weights.kv", "recompute", "keep"),
    )
    assert differences(kept, kept) == ()


@pytest.mark.parametrize(
    ("sampler", "bound"),
    [
        ({"max_off_policy_threshold": 8, "max_off_policy_strategy": "drop"}, 7),
        ({"max_off_policy_threshold": 8, "max_off_policy_strategy": "wait"}, None),
        ({"max_off_policy_threshold": None, "max_off_policy_strategy": "drop"}, None),
    ],
)
def test_an_asynchronous_mode_of_verls_permits_what_it_does_not_drop(
    sampler: dict[str, Any], bound: int | None
) -> None:
    """verl drops a group where steps since it was submitted, plus one, are above the threshold."""

    def with_sampler(**more: Any) -> dict[str, Any]:
        return changed("trainer.v1", {"sampler": sampler | more})

    assert permitted(with_sampler(), "colocate_async") == bound
    assert permitted(with_sampler(custom_sampler={"path": POLLING}), "colocate_async") == bound
    assert permitted(with_sampler(custom_sampler={"path": "own.py"}), "colocate_async") is None
    assert permitted(with_sampler(), "sync") == 0
