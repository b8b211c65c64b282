"""Machines by tags: that the plan can be made, that verl's fields say the same, and that everything fits."""

from __future__ import annotations

from seamless_verl.config.checks.problem import Problem
from seamless_verl.config.checks.roles import by_tags
from seamless_verl.config.checks.settings import Settings, check
from seamless_verl.resources.fitting import Misfit, misfits
from seamless_verl.resources.tags import KEY, ROLLOUT, TRAIN, Layout, Resources
from seamless_verl.resources.verl_fields import verl_fields

STALENESS = "seamless.max_staleness"


@check
def check_resources(settings: Settings) -> list[Problem]:
    """The tags, read by our trainer alone: one description of the machines, from which a plan follows."""
    resources = settings.seamless.resources
    if resources is None:
        return []
    if not by_tags(settings):
        way_out = "Set trainer.v1.trainer_mode=seamless, or remove it"
        return [Problem(KEY, resources.summary(), "only the seamless trainer places machines by tags", way_out)]
    from seamless_verl.config.planning import plan_of

    said_twice = [*_layout(settings, resources), *_fields(settings, resources)]
    if said_twice:
        return said_twice
    unused = plan_of(settings).unused
    return [*_unused(resources, {device.group for device in unused}), *_staleness(settings, resources)]


@check
def check_memory(settings: Settings) -> list[Problem]:
    """Everything fits the devices' memory, as far as both are known; the longest micro-batch is a warning."""
    from seamless_verl.config.planning import memory_facts, plan_of

    if memory_facts(settings) is None:
        return []
    problems = check_resources(settings)
    if any(not problem.warning for problem in problems):
        return []  # said already
    return [_problem(settings, misfit) for misfit in misfits(plan_of(settings))]


def _layout(settings: Settings, resources: Resources) -> list[Problem]:
    asked, found = settings.seamless.layout, resources.layout
    if asked in (Layout.AUTO, found):
        return []
    reason = f"contradicts {KEY}, whose tags are a {found.value} layout"
    return [Problem("seamless.layout", asked.value, reason, "Remove it, or change the tags")]


def _fields(settings: Settings, resources: Resources) -> list[Problem]:
    from seamless_verl.config.planning import replica_sizes, roles_of

    derived = verl_fields(resources, replica=replica_sizes(settings).size, needed=roles_of(settings).tags)
    return [
        Problem(key, settings.get(key), f"contradicts {KEY}, from which {value} follows", f"Remove {key}, or {KEY}")
        for key, value in derived.items()
        if settings.get(key) != value
    ]


def _unused(resources: Resources, names: set[str]) -> list[Problem]:
    return [
        Problem(f"{KEY}[{i}].tags", list(group.tags), f"no part of the run uses {group}", "Take it away", warning=True)
        for i, group in enumerate(resources.groups)
        if group.name in names
    ]


def _staleness(settings: Settings, resources: Resources) -> list[Problem]:
    """On-policy, a machine that only generates and one that trains wait for each other by turns."""
    alone = resources.tagged(ROLLOUT, without=TRAIN)
    if settings.seamless.max_staleness or not alone:
        return []
    reason = f"leaves {', '.join(group.name for group in alone)} idle whenever the trainer computes"
    return [Problem(STALENESS, 0, reason, f"Set {STALENESS}=1, or tag those machines train too", warning=True)]


def _problem(settings: Settings, misfit: Misfit) -> Problem:
    value = settings.get(misfit.key)
    return Problem(misfit.key, value, misfit.reason, misfit.way_out, warning=not misfit.certain)
