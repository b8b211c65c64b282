"""Checks of `seamless.sampler`: options that its sampler does not read, budgets and estimators."""

from __future__ import annotations

from seamless_verl.algorithms.samplers import Sampler, sampler_named
from seamless_verl.config.checks.corrections import MEDIAN, SESSIONS
from seamless_verl.config.roles import (
    has_hybrid_rollout,
    has_standalone_rollout,
    replica_sizes,
)
from seamless_verl.config.settings import Problem, Settings, check
from seamless_verl.config.verl_keys import ESTIMATOR

SAMPLER = "seamless.sampler"
BY_STD = "algorithm.norm_adv_by_std_in_grpo"
DIVIDING = ("grpo", "grpo_vectorized", "grpo_passk", "gdpo", "grpo_novelty")
"""Estimators that read `BY_STD`; the other ones do not divide by the deviation."""
OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg"
"""Of verl's DAPO reward manager."""
SEATS = "actor_rollout_ref.rollout.max_num_seqs"
SMALLEST = 2
"""Samples of a group in which samples can be compared."""


@check
def check_sampler(settings: Settings) -> list[Problem]:
    """The sampler's options, its budgets, and what it needs of rewards, estimator and loss."""
    chosen = settings.seamless.sampler
    if settings.mode != "seamless":
        return _unread(settings, (), f"by trainer.v1.trainer_mode={settings.mode}")
    if chosen.name is None:
        return _unread(settings, (), "without a sampler")
    kind = sampler_named(chosen.name)
    problems = [*_unread(settings, (*kind.OPTIONS, "success"), f"by {chosen.name}"), *_outcomes(settings)]
    if kind.VARIES:
        problems += [*_budgets(settings, kind), *_seats(settings, kind), *_sizes(settings)]
    if kind.REOPENS and settings.get(ESTIMATOR) in DIVIDING and settings.flag(BY_STD, True):
        reason = "divides by the deviation what dars gives hard prompts more samples for"
        problems.append(Problem(BY_STD, True, reason, f"Set {BY_STD}=False"))
    return problems


def _unread(settings: Settings, read: tuple[str, ...], by: str) -> list[Problem]:
    """Warnings of options that are set and not read."""
    chosen = settings.seamless.sampler
    given = {"success": chosen.success, **chosen.options}
    unread = [name for name, value in given.items() if value is not None and name not in read]
    return [
        Problem(f"{SAMPLER}.{name}", given[name], f"is not read {by}", "Leave it out", warning=True) for name in unread
    ]


def _outcomes(settings: Settings) -> list[Problem]:
    """Rewards that are no outcomes from 0 to 1, where the config says so; others are refused when they come."""
    if settings.seamless.sampler.success is not None or not settings.flag(f"{OVERLONG}.enable"):
        return []
    reason = f"takes rewards as pass rates from 0 to 1, and {OVERLONG}.enable=True takes up to a penalty off them"
    way_out = f"Set {SAMPLER}.success to the least reward of a right answer"
    return [Problem(f"{SAMPLER}.success", None, reason, way_out)]


def _budgets(settings: Settings, kind: type[Sampler]) -> list[Problem]:
    """From two samples on there is something to compare, and a sampler that gives more has room for them."""
    samples = settings.integer(SESSIONS)
    most = getattr(kind(), "most", samples)
    if samples < SMALLEST:
        reason = f"leaves {settings.seamless.sampler.name} groups of one, which have nothing to compare"
        return [Problem(SESSIONS, samples, reason, f"Set {SESSIONS}={SMALLEST} or more")]
    if most < samples or (kind.REOPENS and most == samples):
        reason = f"is as many as {settings.seamless.sampler.name} ever gives a prompt, which is {most}"
        return [Problem(SESSIONS, samples, reason, f"Set {SESSIONS}={most - 1} or less, or another sampler")]
    return []


def _seats(settings: Settings, kind: type[Sampler]) -> list[Problem]:
    """The samples of one group can run at once, so that none of it waits for others of it."""
    most, seats = getattr(kind(), "most", 0), seats_of(settings)
    if seats is None or most <= seats:
        return []
    each, name = settings.integer(SEATS, 0, least=0), settings.seamless.sampler.name
    reason = f"lets all engines run {seats} calls at once, and {name} gives a prompt up to {most} samples"
    return [Problem(SEATS, each, reason, f"Set {SEATS}={-(-most * each // seats)} or more, or another sampler")]


def _sizes(settings: Settings) -> list[Problem]:
    """Groups of different sizes: mini-batches are of sessions, and the estimator takes any size."""
    name, problems = settings.seamless.sampler.name, list[Problem]()
    if settings.seamless.tokens.weigh != "session":
        reason = f"counts a mini-batch in rows, of which {name} makes more or fewer"
        problems.append(Problem("seamless.tokens.weigh", "sequence", reason, "Set seamless.tokens.weigh=session"))
    if settings.get(ESTIMATOR) == MEDIAN:
        reason = f"needs groups of an odd size for its pivot, and {name} makes groups of any size"
        way_out = f"Set {ESTIMATOR}=grpo, or {SAMPLER}.name=srpo, which keeps their size"
        problems.append(Problem(ESTIMATOR, MEDIAN, reason, way_out))
    return problems


def seats_of(settings: Settings) -> int | None:
    """Calls that all engines together run at once; None where the number of engines is not known."""
    pools = ["trainer"] if has_hybrid_rollout(settings) else []
    pools += ["actor_rollout_ref.rollout"] if has_standalone_rollout(settings) else []
    devices = sum(
        settings.integer(f"{pool}.nnodes", 0, least=0) * settings.integer(f"{pool}.n_gpus_per_node", 0, least=0)
        for pool in pools
    )
    engines = devices // replica_sizes(settings).size
    return engines * settings.integer(SEATS, 0, least=0) or None
