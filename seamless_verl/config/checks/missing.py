"""Values that must be given (`???` in the yaml), except below a part of the config that is switched off."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from seamless_verl.config.checks.problem import Problem
from seamless_verl.config.checks.roles import has_reward_model, has_teacher, needs_critic
from seamless_verl.config.checks.settings import MISSING, Settings, check

SUGGESTED = {"actor_rollout_ref.rollout.name": "vllm", "reward.reward_model.rollout.name": "vllm"}


@check
def check_missing(settings: Settings) -> list[Problem]:
    """One problem for each value that is still missing and will be read."""
    unused = tuple(_unused(settings))
    keys = [key for key in _missing(settings.tree, "") if not key.startswith(unused)]
    return [Problem(key, MISSING, "has no value", _way_out(key)) for key in keys]


def _way_out(key: str) -> str:
    return f"Add {key}={SUGGESTED.get(key, '...')} to the command"


def _unused(settings: Settings) -> Iterator[str]:
    if not has_reward_model(settings):
        yield "reward.reward_model."
    if not has_teacher(settings):
        yield "distillation."
    if not needs_critic(settings):
        yield "critic."


def _missing(node: object, prefix: str) -> Iterator[str]:
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield from _missing(value, f"{prefix}.{name}" if prefix else str(name))
    elif node == MISSING:
        yield prefix
