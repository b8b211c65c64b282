"""What is read from the composed config of an arm: its budget, which all have alike, and what it has otherwise. Pure.

Arms with the same budget train the same model on the same prompts, with as many samples and optimizer steps, on as many
devices. What may differ is how: the mode, the layout, the bound on staleness, the loss.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from seamless_verl.config.roles import pool_backend
from seamless_verl.config.schema import NODE, SeamlessConfig
from seamless_verl.errors import ConfigError, refuse
from seamless_verl.runtime.fields import rows
from seamless_verl.tools.compare.arms import BOUND, BUFFER, MODE, POLLING, SAMPLER, VERL_MODES, JobFacts, Machines
from seamless_verl.tools.compare.figures import StepSize

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
STEPS, VALIDATE, BATCH = "trainer.total_training_steps", "trainer.test_freq", "data.train_batch_size"
KEYS = (
    *("data.train_files", "data.val_files", BATCH, "data.seed", "data.shuffle"),
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
FIRST = (MODE, f"{ACTOR}.policy_loss.loss_mode", BOUND)
"""Of the settings that differ, those that say what kind of training it is."""
PLACES, NAMES = ("trainer.default_local_dir", "data.seed"), ("experiment_name", "project_name")
ABSENT = "not read"


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


def trainer_devices(tree: Mapping[str, Any]) -> int:
    return count(tree, "trainer.nnodes") * count(tree, "trainer.n_gpus_per_node")


def devices_of(tree: Mapping[str, Any]) -> int:
    """Devices of trainer and standalone rollout together."""
    return trainer_devices(tree) + (pool_devices(tree) if uses_pool(tree) else 0)


def uses_pool(tree: Mapping[str, Any]) -> bool:
    """Whether the mode generates in the standalone rollout pool, if there is one."""
    return select(tree, MODE) in ("separate_async", "seamless") and select(tree, "seamless.layout") != "colocated"


def machines_of(tree: Mapping[str, Any]) -> int:
    """Over how many machines accelerators are spread, at the least, as the config has it."""
    groups = select(tree, "seamless.resources") or ()
    tagged = [int(group.get("count") or 1) for group in groups if isinstance(group, Mapping)]
    pool = count(tree, f"{ROLLOUT}.nnodes") if uses_pool(tree) else 0
    return max(1, count(tree, "trainer.nnodes"), pool, *tagged)


def budget_of(tree: Mapping[str, Any], *, equal_tokens: bool = False) -> dict[str, Any]:
    """What the arms of a comparison must have alike, by key; at equal tokens not what methods differ in."""
    keys = [key for key in KEYS if not (equal_tokens and key in OF_A_METHOD)]
    return {key: select(tree, key) for key in keys} | {"devices": devices_of(tree)}


def check_same_budget(budgets: Mapping[str, Mapping[str, Any]]) -> None:
    """ConfigError with every key in which an arm differs from the first one; `budgets` are by the arms' names."""
    first, *others = budgets
    way_out = "Give it to all arms, as an argument of its own, or leave it out of this arm"
    refuse(
        [
            ConfigError(key, budgets[name][key], f"arm {name} differs from {first}, which has {value!r}", way_out)
            for name in others
            for key, value in budgets[first].items()
            if budgets[name][key] != value
        ]
    )


def step_size(tree: Mapping[str, Any]) -> StepSize:
    """What a step is: all samples, those of a prompt, and the optimizer steps, which are those of a weight version."""
    batch, group = count(tree, BATCH), count(tree, f"{ROLLOUT}.n")
    updates = max(1, batch // (count(tree, f"{ACTOR}.ppo_mini_batch_size") or batch or 1))
    return StepSize(batch * group, group, updates * max(1, count(tree, f"{ACTOR}.ppo_epochs")))


def steps_of(tree: Mapping[str, Any], otherwise: int) -> int:
    """The steps of an arm's run, which at equal tokens may be its own."""
    return count(tree, STEPS) or otherwise


def permitted(tree: Mapping[str, Any], mode: str) -> int | None:
    """Staleness that an arm allows, in weight versions; None where nothing bounds it.

    verl's asynchronous modes drop a finished group before a step whose number less that of the step in which the group
    was submitted, plus one, is above the threshold (`ReplayBufferAsync._stale_terminal_keys`). With the strategy `wait`
    they hold a step back for groups that are still generated, and train what had finished however old it is.
    """
    if mode == "sync":
        return 0
    if mode not in VERL_MODES:
        found = select(tree, BOUND)
        return None if found is None else int(found)
    threshold = select(tree, f"{SAMPLER}.max_off_policy_threshold")
    drops = select(tree, f"{SAMPLER}.max_off_policy_strategy") == "drop" and threshold is not None
    verls_buffer = select(tree, f"{BUFFER}.path") in (None, POLLING)
    return int(threshold) - 1 if drops and verls_buffer else None


def facts_of(
    tree: Mapping[str, Any], *, devices: int | None, on_machine: int | None, splits: bool, gpus: int | None = None
) -> JobFacts:
    """What the arms' overrides follow from; ConfigError for `devices` of a job that describes its machines by tags.

    `devices` are the user's, None for the job's own, `on_machine` and `gpus` what is known of this machine. A job of
    one device gets a second one with `splits`, which says that an arm needs two. A job whose trainer and whose rollout
    pool have as many devices a machine, and together more than this machine, has the machines of both, so that no arm
    gets one machine with all of its devices.
    """
    by_tags = bool(select(tree, "seamless.resources"))
    if by_tags and devices is not None:
        raise ConfigError("--devices", devices, "seamless.resources describes the machines", "Leave one of them out")
    nodes, own, pool = max(1, count(tree, "trainer.nnodes")), devices_of(tree), pool_devices(tree)
    total = devices or (2 if splits and own == 1 and (on_machine or 1) >= 2 and not by_tags else own)
    alike = count(tree, "trainer.n_gpus_per_node") == count(tree, f"{ROLLOUT}.n_gpus_per_node")
    if total == own and uses_pool(tree) and pool > 0 and alike and own > (on_machine or gpus or 0):
        nodes += count(tree, f"{ROLLOUT}.nnodes")
    nodes = 1 if total % nodes else nodes
    return JobFacts(
        machines=Machines(nodes, total // nodes),
        batch=count(tree, BATCH),
        mini_batch=count(tree, f"{ACTOR}.ppo_mini_batch_size") or count(tree, BATCH),
        pool_backend=pool_backend(
            select(tree, f"{ROLLOUT}.checkpoint_engine.backend"), accelerator=select(tree, "trainer.device") != "cpu"
        ),
        by_tags=by_tags,
        own_layout=pool > 0 and total == own,
    )


@dataclass(frozen=True)
class Difference:
    """A setting of an arm, and what the first arm has there, as they are written in a config."""

    key: str
    value: str
    first: str

    def __str__(self) -> str:
        return f"{self.key}={self.value} ({self.first})"


def differences(config: Mapping[str, Any], first: Mapping[str, Any]) -> tuple[Difference, ...]:
    """The settings of an arm that differ from those of the first one; `FIRST` come first.

    What a trainer does not read is no setting of its: verl's modes do not read the `seamless:` node. Beside such an
    arm, ours has what is no default there, and its bound on staleness in any case.
    """
    own, other = settings_read(config), settings_read(first)
    defaults = {row.key: written(row.default) for row in rows(SeamlessConfig, NODE)}
    listed = [
        key
        for key in own | other
        if own.get(key, ABSENT) != other.get(key, ABSENT)
        and (key == BOUND or key in own.keys() & other.keys() or (own | other)[key] != defaults.get(key))
    ]
    listed.sort(key=lambda key: (FIRST.index(key) if key in FIRST else len(FIRST), key))
    return tuple(Difference(key, own.get(key, ABSENT), other.get(key, ABSENT)) for key in listed)


def settings_read(config: Mapping[str, Any]) -> dict[str, str]:
    """What the trainer of this config may read, by key, without the places and the names of one run."""
    unread = select(config, MODE) in VERL_MODES
    return {
        key: written(value)
        for key, value in leaves(config)
        if key not in PLACES and key.rpartition(".")[2] not in NAMES and not (unread and key.startswith(f"{NODE}."))
    }


def leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
