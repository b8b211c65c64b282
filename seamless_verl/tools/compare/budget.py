"""The budget of a run: what all arms must have alike, read from their composed configs. Pure.

Arms with the same budget train the same model on the same prompts, with as many samples and optimizer steps, on as many
devices. What may differ is how: the mode, the layout, the bound on staleness, the loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seamless_verl.config.roles import pool_backend
from seamless_verl.errors import ConfigError, refuse
from seamless_verl.tools.compare.arms import JobFacts, Machines

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
STEPS, VALIDATE = "trainer.total_training_steps", "trainer.test_freq"
KEYS = (
    *("data.train_files", "data.val_files", "data.train_batch_size", "data.seed", "data.shuffle"),
    *("data.max_prompt_length", "data.max_response_length", "data.train_max_samples"),
    *("actor_rollout_ref.model.path", "actor_rollout_ref.model.lora_rank", STEPS),
    *(f"{ROLLOUT}.n", f"{ROLLOUT}.temperature", f"{ROLLOUT}.top_p", f"{ROLLOUT}.top_k", f"{ROLLOUT}.dtype"),
    *(f"{ROLLOUT}.max_model_len", f"{ROLLOUT}.agent.default_agent_loop"),
    *(f"{ACTOR}.ppo_mini_batch_size", f"{ACTOR}.ppo_epochs", f"{ACTOR}.optim.lr"),
    *("algorithm.adv_estimator", "reward.custom_reward_function.path", "reward.custom_reward_function.name"),
    *(VALIDATE, "trainer.val_before_train", "trainer.device", "seamless.sampler.name"),
)
OF_A_METHOD = (f"{ROLLOUT}.n", "algorithm.adv_estimator", "seamless.sampler.name", STEPS, VALIDATE)
"""What methods differ in that are compared at equal tokens: whom they sample, how often, and what they make of it.

One whose steps generate more may make fewer of them, and validate more often.
"""
DEVICES = "devices"  # of trainer and rollout together, which no single key has
WAY_OUT = "Give it to all arms, as an argument of its own, or leave it out of this arm"


def select(tree: Mapping[str, Any], key: str) -> Any:
    """The value of a key, None where the config does not have it."""
    value: Any = tree
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def count(tree: Mapping[str, Any], key: str) -> int:
    """A number of things; 0 where there is none."""
    return int(select(tree, key) or 0)


def pool_devices(tree: Mapping[str, Any]) -> int:
    """Devices of the standalone rollout pool."""
    return count(tree, f"{ROLLOUT}.nnodes") * count(tree, f"{ROLLOUT}.n_gpus_per_node")


def devices_of(tree: Mapping[str, Any]) -> int:
    """Devices of trainer and standalone rollout together."""
    trainer = count(tree, "trainer.nnodes") * count(tree, "trainer.n_gpus_per_node")
    return trainer + (pool_devices(tree) if uses_pool(tree) else 0)


def uses_pool(tree: Mapping[str, Any]) -> bool:
    """Whether the mode generates in the standalone rollout pool, if there is one."""
    mode = select(tree, "trainer.v1.trainer_mode")
    return mode in ("separate_async", "seamless") and select(tree, "seamless.layout") != "colocated"


def machines_of(tree: Mapping[str, Any]) -> int:
    """Over how many machines accelerators are spread, at the least, as the config has it."""
    groups = select(tree, "seamless.resources") or ()
    tagged = [int(group.get("count") or 1) for group in groups if isinstance(group, Mapping)]
    pool = count(tree, f"{ROLLOUT}.nnodes") if uses_pool(tree) else 0
    return max(1, count(tree, "trainer.nnodes"), pool, *tagged)


def budget_of(tree: Mapping[str, Any], *, equal_tokens: bool = False) -> dict[str, Any]:
    """What the arms of a comparison must have alike, by key; at equal tokens not what methods differ in."""
    keys = [key for key in KEYS if not (equal_tokens and key in OF_A_METHOD)]
    return {key: select(tree, key) for key in keys} | {DEVICES: devices_of(tree)}


def check_same_budget(budgets: Mapping[str, Mapping[str, Any]]) -> None:
    """ConfigError with every key in which an arm differs from the first one; `budgets` are by the arms' names."""
    first, *others = budgets
    refuse(
        [
            ConfigError(key, budgets[name][key], f"arm {name} differs from {first}, which has {value!r}", WAY_OUT)
            for name in others
            for key, value in budgets[first].items()
            if budgets[name][key] != value
        ]
    )


def samples_of_step(tree: Mapping[str, Any]) -> int:
    """Samples, of all prompts, that a step trains."""
    return count(tree, "data.train_batch_size") * count(tree, f"{ROLLOUT}.n")


def steps_of(tree: Mapping[str, Any], otherwise: int) -> int:
    """The steps of an arm's run, which at equal tokens may be its own."""
    return count(tree, STEPS) or otherwise


def updates_of_step(tree: Mapping[str, Any]) -> int:
    """Optimizer steps of a step, and so of a weight version."""
    mini = count(tree, f"{ACTOR}.ppo_mini_batch_size") or count(tree, "data.train_batch_size")
    return max(1, count(tree, "data.train_batch_size") // mini) * max(1, count(tree, f"{ACTOR}.ppo_epochs"))


def apart(tree: Mapping[str, Any], on_machine: int) -> bool:
    """Whether trainer and pool are on machines of their own with as many devices each."""
    alike = count(tree, "trainer.n_gpus_per_node") == count(tree, f"{ROLLOUT}.n_gpus_per_node")
    return uses_pool(tree) and pool_devices(tree) > 0 and alike and devices_of(tree) > on_machine


def facts_of(
    tree: Mapping[str, Any], *, devices: int | None, on_machine: int | None, splits: bool, gpus: int | None = None
) -> JobFacts:
    """What the arms' overrides follow from.

    A job whose trainer and whose rollout pool have as many devices a machine, and together more than this machine, has
    the machines of both, so that no arm gets one machine with all of its devices.

    Args:
        devices: those of the comparison, as the user gave them; None for the job's own.
        on_machine: devices of this machine, where it is known; a job that has one device gets a second one with
            `splits`, which says that an arm needs two.
        gpus: the GPUs of this machine, where NVML says so.

    Raises:
        ConfigError: devices were given for a job whose machines are described by their tags.
    """
    by_tags = bool(select(tree, "seamless.resources"))
    if by_tags and devices is not None:
        raise ConfigError("--devices", devices, "seamless.resources describes the machines", "Leave one of them out")
    accelerator = select(tree, "trainer.device") != "cpu"
    nodes, own = max(1, count(tree, "trainer.nnodes")), devices_of(tree)
    total = devices or (2 if splits and own == 1 and (on_machine or 1) >= 2 and not by_tags else own)
    if total == own and apart(tree, on_machine or gpus or 0):
        nodes += count(tree, f"{ROLLOUT}.nnodes")
    alone = total % nodes or nodes == 1
    backend = select(tree, f"{ROLLOUT}.checkpoint_engine.backend")
    mini = count(tree, f"{ACTOR}.ppo_mini_batch_size")
    return JobFacts(
        machines=Machines(1 if alone else nodes, total if alone else total // nodes, accelerator),
        batch=count(tree, "data.train_batch_size"),
        mini_batch=mini or count(tree, "data.train_batch_size"),
        pool_backend=pool_backend(backend, accelerator=accelerator),
        by_tags=by_tags,
        own_layout=pool_devices(tree) > 0 and total == own,
    )
