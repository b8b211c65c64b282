"""Batch sizes: train batch, mini-batches, micro-batches and the ranks that share them.

A train batch is `train_batch_size` prompts, cut into `parameter_sync_step` local updates, each cut
into mini-batches of `ppo_mini_batch_size` prompts; a mini-batch has n sequences a prompt, shared by
the data-parallel ranks and cut into micro-batches. Where verl would pad an uneven train batch with
synthetic sequences (trainer_base.py `_balance_batch`), the batch is refused here instead.
Sources: verl/utils/config.py `validate_config`, verl/workers/config/actor.py, trainer_base.py `step`,
trainer_separate_async.py `__init__`, workers/engine_workers.py, workers/engine/utils.py.
"""

from __future__ import annotations

from seamless_verl.config.checks.problem import Problem
from seamless_verl.config.checks.roles import needs_critic
from seamless_verl.config.checks.settings import Settings, check
from seamless_verl.config.checks.sizes import data_parallel_size

TRAIN = "data.train_batch_size"
MINI = "actor_rollout_ref.actor.ppo_mini_batch_size"
SAMPLES = "actor_rollout_ref.rollout.n"


def sync_step_key(settings: Settings) -> str:
    return f"trainer.v1.{settings.mode}.parameter_sync_step"


@check
def check_train_batch(settings: Settings) -> list[Problem]:
    """The train batch is a whole number of local updates, each a whole number of mini-batches."""
    train, mini = settings.integer(TRAIN), settings.integer(MINI)
    key = sync_step_key(settings)
    updates = settings.integer(key, 1)
    if settings.mode == "separate_async":
        return _exact_train_batch(key, train, mini, updates)
    unit = mini * updates
    if train % unit == 0:
        return _generation_batch(settings, train)
    parts = f"{MINI}={mini}" if updates == 1 else f"{MINI}={mini} x {key}={updates} = {unit}"
    way_out = f"Set {TRAIN}={_up(train, unit)}{_or_mini(train, mini, updates)}"
    return [Problem(TRAIN, train, f"is not a multiple of {parts}", way_out)]


@check
def check_mini_batch(settings: Settings) -> list[Problem]:
    """Every data-parallel rank gets the same number of sequences of a mini-batch."""
    ranks = data_parallel_size(settings)
    keys = [MINI]
    if needs_critic(settings) and settings.get("critic.ppo_mini_batch_size") is not None:
        keys.append("critic.ppo_mini_batch_size")
    samples = settings.integer(SAMPLES)
    return [
        Problem(
            key,
            settings.get(key),
            f"x {SAMPLES}={samples} sequences do not divide among {ranks} data-parallel ranks",
            f"Make {key} x {SAMPLES} a multiple of {ranks}",
        )
        for key in keys
        if ranks and settings.integer(key) * samples % ranks
    ]


@check
def check_critic_batch(settings: Settings) -> list[Problem]:
    """The critic's mini-batches, when they differ from the actor's, divide a local update too."""
    key = "critic.ppo_mini_batch_size"
    if not needs_critic(settings) or settings.get(key) in (None, settings.integer(MINI)):
        return []
    train, mini = settings.integer(TRAIN), settings.integer(key)
    unit = mini * settings.integer(sync_step_key(settings), 1)
    if train % unit == 0:
        return []
    way_out = f"Set {key}={settings.integer(MINI)}, as the actor's"
    return [Problem(key, mini, f"does not divide {TRAIN}={train}", way_out)]


def _exact_train_batch(key: str, train: int, mini: int, updates: int) -> list[Problem]:
    if train == updates * mini:
        return []
    reason = f"separate_async needs {key}={updates} x {MINI}={mini} = {updates * mini}"
    instead = f", or {MINI}={train // updates}" if train % updates == 0 else ""
    return [Problem(TRAIN, train, reason, f"Set {TRAIN}={updates * mini}{instead}")]


def _generation_batch(settings: Settings, train: int) -> list[Problem]:
    key = "data.gen_batch_size"
    # Every other mode, and a sync one that refills, has verl fetch prompts one by one.
    refills = settings.flag("algorithm.filter_groups.enable") or settings.flag(
        "trainer.v1.sampler.sync_refill_failed_groups"
    )
    if settings.mode != "sync" or refills or settings.get(key) is None:
        return []
    fetch = settings.integer(key)
    if train % fetch == 0:
        return []
    return [Problem(key, fetch, f"does not divide {TRAIN}={train}", f"Remove it, or set {key}={train}")]


def _or_mini(train: int, mini: int, updates: int) -> str:
    """The largest mini-batch, no larger than the one given, into which the train batch can be cut."""
    if train % updates:
        return ""
    update = train // updates
    return f", or {MINI}={max(size for size in range(1, min(mini, update) + 1) if update % size == 0)}"


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
