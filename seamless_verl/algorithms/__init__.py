"""Policy losses, advantage estimators and samplers, a method a file; a new one is a file and a line here."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from typing import Generic, TypeVar

T = TypeVar("T")

LOSSES = {"interpolated": "interpolated", "m2po": "m2po"}
"""Policy losses by verl's `policy_loss.loss_mode`, each with its module here."""
ESTIMATORS = {"hgpo": "hgpo", "mc_grpo": "median", "grpo_novelty": "novelty"}
"""Advantage estimators by verl's `algorithm.adv_estimator`, each with its module here."""
OF_TURNS = ("hgpo",)
"""Those that compare turns, and read the rewards that turns were given."""


def register(algorithms: Mapping[str, str]) -> None:
    """Registers them with verl, in this process: their modules do it when they are imported."""
    for module in algorithms.values():
        import_module(f"{__name__}.{module}")


class Given(Generic[T]):
    """What a registered function is given beside verl's arguments, around the call, in the thread that computes it.

    `lacking` is the error outside of it. Settings that would lead there, in another trainer mode, are refused before.
    """

    def __init__(self, lacking: str) -> None:
        self.lacking, self._value = lacking, ContextVar[T | None]("given", default=None)

    def __call__(self) -> T:
        if (value := self._value.get()) is None:
            raise RuntimeError(self.lacking)
        return value

    @contextmanager
    def during(self, value: T) -> Iterator[None]:
        token = self._value.set(value)
        try:
            yield
        finally:
            self._value.reset(token)
