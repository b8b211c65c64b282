"""Checks of advantage estimators: the mode that those of this package need, and the size of a group."""

from __future__ import annotations

from seamless_verl.algorithms import OF_TURNS
from seamless_verl.config.settings import Problem, Settings, check
from seamless_verl.config.verl_keys import ESTIMATOR, OWN_ESTIMATORS

SESSIONS = "actor_rollout_ref.rollout.n"
GATEWAY = "seamless.gateway.enabled"
MEDIAN = "mc_grpo"
PAIRS = "grpo_passk"  # verl's, which raises ValueError for a group of one
WITHIN_GROUPS = ("grpo", "grpo_vectorized", "rloo", "rloo_vectorized", "opo", "gpg")
"""verl's estimators whose baseline is a group's own rewards. In a group of one it is 0, or the sample has no advantage
(verl's core_algos.py)."""


@check
def check_turns(settings: Settings) -> list[Problem]:
    """An estimator that compares turns has turns: sessions of agents, which the gateway records call by call.

    Rewards of turns are posted to the gateway, so that without it there are none of these either.
    """
    estimator = settings.get(ESTIMATOR)
    if estimator not in OF_TURNS or settings.mode != "seamless" or settings.seamless.gateway.enabled:
        return []
    reason = "compares turns and reads their rewards, and without the gateway each session is one turn without any"
    way_out = f"Set {GATEWAY}=true and train an agent (docs/agents.md), or {ESTIMATOR}=grpo"
    return [Problem(ESTIMATOR, estimator, reason, way_out)]


@check
def check_own_estimators(settings: Settings) -> list[Problem]:
    """An estimator of this package runs in our mode, on groups in which sessions can be compared."""
    estimator = settings.get(ESTIMATOR)
    if estimator not in OWN_ESTIMATORS:
        return []
    if settings.mode != "seamless":
        way_out = f"Set trainer.v1.trainer_mode=seamless, or {ESTIMATOR}=grpo"
        return [Problem(ESTIMATOR, estimator, "is registered by the seamless trainer alone", way_out)]
    sessions = settings.integer(SESSIONS)
    if sessions == 1:
        alone = "it is its own pivot, which is not trained" if estimator == MEDIAN else "nothing to compare it with"
        reason = f"has groups of {SESSIONS}=1 session: {alone}"
        least = "3 or another odd number" if estimator == MEDIAN else "2 or more"
        return [Problem(ESTIMATOR, estimator, reason, f"Set {SESSIONS}={least}, or another estimator")]
    if estimator == MEDIAN and sessions % 2 == 0:
        reason = f"has no pivot in groups of {SESSIONS}={sessions}, an even number: the median is between two sessions"
        return [Problem(ESTIMATOR, estimator, reason, f"Set {SESSIONS}={sessions + 1}", warning=True)]
    return []


@check
def check_lone_samples(settings: Settings) -> list[Problem]:
    """verl's estimators that compare the samples of a group, where a group has one; most go on without a baseline."""
    estimator = settings.get(ESTIMATOR)
    samples_vary = settings.mode == "seamless" and settings.seamless.sampler.name is not None
    if estimator not in (PAIRS, *WITHIN_GROUPS) or settings.integer(SESSIONS) != 1 or samples_vary:
        return []
    reason = f"has groups of {SESSIONS}=1 sample: nothing to compare it with"
    return [Problem(ESTIMATOR, estimator, reason, f"Set {SESSIONS}=4 or more", warning=estimator != PAIRS)]
