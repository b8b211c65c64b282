"""Numbers that nothing else reads before the run: verl and vLLM would meet them a minute or two after the start."""

from __future__ import annotations

from seamless_verl.config.checks.problem import Problem
from seamless_verl.config.checks.settings import Settings, check
from seamless_verl.errors import ConfigError

ROLLOUT = "actor_rollout_ref.rollout"
WHOLE = {
    f"{ROLLOUT}.max_num_seqs": 1,
    f"{ROLLOUT}.n": 1,
}
"""Keys, and the least that each can be when it is given."""
REAL = (
    *(f"{part}.optim.{name}" for part in ("actor_rollout_ref.actor", "critic") for name in ("lr", "weight_decay")),
    *(f"actor_rollout_ref.actor.{name}" for name in ("clip_ratio", "entropy_coeff", "kl_loss_coef")),
    *(f"{ROLLOUT}.{name}" for name in ("temperature", "top_p")),
    *("algorithm.gamma", "algorithm.lam"),
)
"""Keys of numbers; what verl is given as text it compares with numbers."""
OFTEN = ("save_freq", "test_freq")  # of `trainer`, whole numbers; -1 is never
SHARE = f"{ROLLOUT}.gpu_memory_utilization"


@check
def check_numbers(settings: Settings) -> list[Problem]:
    """Each is a number that it can be."""
    given = {key: least for key, least in WHOLE.items() if settings.get(key) is not None}
    given |= {f"trainer.{name}": -1 for name in OFTEN if name in settings.get("trainer", {})}
    problems = [problem for key, least in given.items() if (problem := _whole(settings, key, least)) is not None]
    reals = ((key, settings.get(key)) for key in REAL)
    problems += [
        Problem(key, value, "is no number", f"Set {key} to a number") for key, value in reals if not _real(value)
    ]
    share = settings.get(SHARE)
    if share is not None and not (_real(share) and 0 < share <= 1):
        problems.append(Problem(SHARE, share, "must be a number above 0, at most 1", f"Set {SHARE}=0.5"))
    return problems


def _real(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _whole(settings: Settings, key: str, least: int) -> Problem | None:
    try:
        settings.integer(key, least=least)
    except ConfigError as error:
        return Problem.of(error)
    return None
