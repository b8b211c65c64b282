"""Checks of single values: missing ones, numbers and modes that nothing else reads before the run.

Missing values (`???` in the yaml) count unless the part of the config that they belong to is switched off. verl and
vLLM would refuse the others a minute or two after the start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from seamless_verl.config import engine_kwargs
from seamless_verl.config.checks.modes import ROLLOUT
from seamless_verl.config.roles import has_reward_model, has_teacher, needs_critic
from seamless_verl.config.settings import MISSING, Problem, Settings, check
from seamless_verl.config.verl_keys import VERL_MODES

SUGGESTED = {"actor_rollout_ref.rollout.name": "vllm", "reward.reward_model.rollout.name": "vllm"}


@check
def check_missing(settings: Settings) -> list[Problem]:
    """One problem for each missing value that the run will read."""
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


@check
def check_temperature(settings: Settings) -> list[Problem]:
    """Training divides logits by the temperature, and verl samples validations with one above 0, where it samples."""
    keys = [f"{ROLLOUT}.temperature"]
    if settings.get(f"{ROLLOUT}.val_kwargs.do_sample") is True:
        keys.append(f"{ROLLOUT}.val_kwargs.temperature")
    given = [(key, settings.get(key)) for key in keys]
    return [
        Problem(key, value, "must be above 0", f"Set {key}=1.0")
        for key, value in given
        if isinstance(value, int | float) and not value > 0
    ]


LOGPROBS_MODES = ("processed_logprobs", "raw_logprobs")
"""Of vLLM's modes those that give logprobs; replica/own_logprobs.py makes the model's own of both."""


@check
def check_logprobs_mode(settings: Settings) -> list[Problem]:
    """The engines record logprobs, which the trainer uses, and not logits."""
    overriding = engine_kwargs.given(settings.get(engine_kwargs.KEY), "logprobs_mode")
    keys = {f"{ROLLOUT}.logprobs_mode": settings.get(f"{ROLLOUT}.logprobs_mode")}
    keys |= {} if overriding is None else {f"{engine_kwargs.KEY}.logprobs_mode": overriding}
    if settings.mode in VERL_MODES:
        return []
    return [
        Problem(key, value, "gives no logprobs to train with", f"Set {key}={' or '.join(LOGPROBS_MODES)}")
        for key, value in keys.items()
        if value is not None and value not in LOGPROBS_MODES
    ]
