"""Micro-batch sizes, which only matter while `use_dynamic_bsz` is off.

Sources: verl/workers/config/actor.py `__post_init__`, verl/utils/config.py `check_mutually_exclusive`,
verl/workers/engine_workers.py `init_model`, verl/workers/engine/utils.py `prepare_micro_batches`.
"""

from __future__ import annotations

from seamless_verl.config.checks.batches import MINI, SAMPLES, TRAIN, sync_step_key
from seamless_verl.config.checks.problem import Problem
from seamless_verl.config.checks.roles import needs_critic, needs_reference
from seamless_verl.config.checks.settings import Settings, check
from seamless_verl.config.checks.sizes import data_parallel_size

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
REFERENCE = "actor_rollout_ref.ref"


@check
def check_micro_batches(settings: Settings) -> list[Problem]:
    """Where micro-batches have a fixed size it is given once and divides what one rank gets."""
    dynamic = settings.flag(f"{ACTOR}.use_dynamic_bsz")
    problems = _same_choice(settings, dynamic)
    if not dynamic:
        mini = _rank_share(settings, settings.integer(MINI))
        update = _rank_share(settings, _update_prompts(settings))
        problems += _fixed(settings, ACTOR, "ppo_micro_batch_size", mini)
        bypass = settings.flag("algorithm.rollout_correction.bypass_mode")
        problems += _fixed(settings, ROLLOUT, "log_prob_micro_batch_size", None if bypass else update)
    return problems


@check
def check_reference_micro_batches(settings: Settings) -> list[Problem]:
    """The same for the reference model, when there is one."""
    if not needs_reference(settings) or settings.flag(f"{REFERENCE}.log_prob_use_dynamic_bsz"):
        return []
    update = _rank_share(settings, _update_prompts(settings))
    return _fixed(settings, REFERENCE, "log_prob_micro_batch_size", update)


@check
def check_critic_micro_batches(settings: Settings) -> list[Problem]:
    """The same for the critic, when there is one."""
    if not needs_critic(settings) or settings.flag("critic.use_dynamic_bsz"):
        return []
    mini = _rank_share(settings, settings.integer("critic.ppo_mini_batch_size"))
    return _fixed(settings, "critic", "ppo_micro_batch_size", mini)


def _same_choice(settings: Settings, dynamic: bool) -> list[Problem]:
    key = f"{ROLLOUT}.log_prob_use_dynamic_bsz"
    chosen = settings.flag(key, dynamic)
    if chosen == dynamic:
        return []
    reason = f"differs from {ACTOR}.use_dynamic_bsz={dynamic}"
    return [Problem(key, chosen, reason, f"Remove it, or set {key}={dynamic}")]


def _fixed(settings: Settings, part: str, name: str, share: int | None) -> list[Problem]:
    """`share` is how many sequences a rank cuts into micro-batches; None when it does not, or not evenly."""
    key, old = f"{part}.{name}_per_gpu", settings.get(f"{part}.{name}")
    if settings.get(key) is None:
        way_out = f"Set {key}=1 or more, or {ACTOR}.use_dynamic_bsz=True"
        return [Problem(key, None, "must be given while use_dynamic_bsz is off", way_out)]
    if old is not None:
        return [Problem(f"{part}.{name}", old, f"is given together with {key}", f"Remove {part}.{name}")]
    micro = settings.integer(key)
    if share is None or share % micro == 0:
        return []
    reason = f"does not divide the {share} sequences of one data-parallel rank"
    return [Problem(key, micro, reason, f"Set {key} to a divisor of {share}")]


def _update_prompts(settings: Settings) -> int:
    return settings.integer(TRAIN) // settings.integer(sync_step_key(settings), 1)


def _rank_share(settings: Settings, prompts: int) -> int | None:
    """Sequences of `prompts` prompts on one rank; None when they do not divide (reported elsewhere)."""
    ranks = data_parallel_size(settings)
    sequences = prompts * settings.integer(SAMPLES)
    return sequences // ranks if ranks and sequences % ranks == 0 else None
