"""Checks of single values: missing ones, numbers and modes that nothing else reads before the run.

Missing values (`???` in the yaml) count unless the part of the config that they belong to is switched off. verl and
vLLM would refuse the others a minute or two after the start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from seamless_verl.config import engine_kwargs
from seamless_verl.config.checks.modes import ROLLOUT, VERL_MODES
from seamless_verl.config.roles import has_reward_model, has_teacher, needs_critic
from seamless_verl.config.settings import MISSING, Problem, Settings, check
from seamless_verl.errors import ConfigError

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


WHOLE_NUMBERS = {
    f"{ROLLOUT}.max_num_seqs": 1,
    f"{ROLLOUT}.n": 1,
    "data.seed": -(2**63),
}
"""Keys of whole numbers, with the least allowed value."""
REAL_NUMBERS = (
    *(f"{part}.optim.{name}" for part in ("actor_rollout_ref.actor", "critic") for name in ("lr", "weight_decay")),
    *(f"actor_rollout_ref.actor.{name}" for name in ("clip_ratio", "entropy_coeff", "kl_loss_coef")),
    f"{ROLLOUT}.temperature",
    *("algorithm.gamma", "algorithm.lam"),
)
"""Keys of numbers; verl would compare a text with numbers and fail."""
FLAGS = ("data.shuffle", "trainer.val_before_train", "trainer.val_only")
FREQUENCIES = ("save_freq", "test_freq")  # of `trainer`, whole numbers; -1 is never
SHARES = {
    f"{ROLLOUT}.gpu_memory_utilization": 0.5,
    f"{ROLLOUT}.top_p": 1.0,
    f"{ROLLOUT}.val_kwargs.top_p": 1.0,
}
"""Keys of numbers above 0 and at most 1, with an example of each."""


@check
def check_numbers(settings: Settings) -> list[Problem]:
    """Each of these keys is a number within its bounds."""
    given = {key: least for key, least in WHOLE_NUMBERS.items() if settings.get(key) is not None}
    given |= {f"trainer.{name}": -1 for name in FREQUENCIES if name in settings.get("trainer", {})}
    problems = [problem for key, least in given.items() if (problem := _whole(settings, key, least)) is not None]
    reals = ((key, settings.get(key)) for key in REAL_NUMBERS)
    problems += [
        Problem(key, value, "is no number", f"Set {key} to a number") for key, value in reals if not _real(value)
    ]
    return [*problems, *_no_shares(settings)]


def _no_shares(settings: Settings) -> list[Problem]:
    """Of the keys of shares those whose value is none."""
    given = [(key, settings.get(key), example) for key, example in SHARES.items()]
    return [
        Problem(key, value, "must be a number above 0, at most 1", f"Set {key}={example}")
        for key, value, example in given
        if value is not None and not (_real(value) and 0 < value <= 1)
    ]


@check
def check_flags(settings: Settings) -> list[Problem]:
    """Each of these keys is true or false."""
    given = [(key, settings.get(key)) for key in FLAGS]
    return [
        Problem(key, value, "is neither true nor false", f"Set {key}=true or {key}=false")
        for key, value in given
        if value is not None and not isinstance(value, bool)
    ]


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
        if value is not None and _real(value) and not value > 0
    ]


LOSS_AGGREGATIONS = (
    *("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"),
)
"""verl's: verl/workers/config/actor.py `ActorConfig.__post_init__`."""
ENGINE_DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")
"""vLLM's: vllm/config/model.py `ModelDType`."""
CHOICES = {"actor_rollout_ref.actor.loss_agg_mode": LOSS_AGGREGATIONS, f"{ROLLOUT}.dtype": ENGINE_DTYPES}


@check
def check_choices(settings: Settings) -> list[Problem]:
    """Each of these keys has one of the values that verl or vLLM knows."""
    given = [(key, settings.get(key), choices) for key, choices in CHOICES.items()]
    return [
        Problem(key, value, "is not known", f"Set it to one of {', '.join(choices)}")
        for key, value, choices in given
        if value is not None and value not in choices
    ]


def _real(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _whole(settings: Settings, key: str, least: int) -> Problem | None:
    try:
        settings.integer(key, least=least)
    except ConfigError as error:
        return Problem.of(error)
    return None


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
