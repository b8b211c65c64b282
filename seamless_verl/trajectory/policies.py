"""Staleness policies: which generated tokens of a sequence are fresh enough to train.

Staleness is the trainer's version minus the token's; 0 is on-policy. A policy is a frozen object
without state: it reads a view and returns a mask, so a trainer and a simulation run the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from seamless_verl.errors import ConfigError

Bools: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class TokenView:
    """A response as a policy sees it: versions int32 [R], generated bool [R]; versions count only where generated."""

    versions: NDArray[np.int32]
    generated: Bools
    trainer_version: int

    def older_than(self, limit: int) -> Bools:
        """Bool [R]: generated, and staler than the limit."""
        return self.generated & (self.trainer_version - self.versions > limit)


class TokenPolicy(Protocol):
    """What assembly asks of a policy."""

    def decide(self, view: TokenView) -> Bools:
        """Bool [R], true for each token to train; only generated ones may be."""

    def metrics(self) -> dict[str, float]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class _Stateless:
    """Settings come from the config, so there is nothing to save."""

    def metrics(self) -> dict[str, float]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError on anything but an empty state: it was saved by another policy."""
        if state:
            raise ValueError(f"{type(self).__name__} has no state, but was given {sorted(state)}; load its own state")


@dataclass(frozen=True)
class _Bounded(_Stateless):
    max_staleness: int

    def __post_init__(self) -> None:
        if self.max_staleness < 0:
            raise ConfigError("max_staleness", self.max_staleness, "no token is newer than 0", "Give 0 or more")

    def metrics(self) -> dict[str, float]:
        return {"policy/max_staleness": float(self.max_staleness)}


@dataclass(frozen=True)
class TrainAll(_Stateless):
    """Every generated token is trained."""

    def decide(self, view: TokenView) -> Bools:
        return view.generated


@dataclass(frozen=True)
class MaskOlderThan(_Bounded):
    """Tokens staler than the bound are masked, the others are trained."""

    def decide(self, view: TokenView) -> Bools:
        return view.generated & ~view.older_than(self.max_staleness)


@dataclass(frozen=True)
class DropIfOlderThan(_Bounded):
    """A sequence with any token staler than the bound is dropped whole."""

    def decide(self, view: TokenView) -> Bools:
        return view.generated & (not view.older_than(self.max_staleness).any())


@dataclass(frozen=True)
class FreshTailOnly(_Stateless):
    """Only the generated tokens after the last one that is not on-policy."""

    def decide(self, view: TokenView) -> Bools:
        off = np.flatnonzero(view.generated & (view.versions != view.trainer_version))
        keep = view.generated.copy()
        keep[: int(off[-1]) + 1 if off.size else 0] = False
        return keep


POLICIES: dict[str, Callable[[int], TokenPolicy]] = {
    "train_all": lambda _: TrainAll(),
    "mask_older_than": MaskOlderThan,
    "drop_if_older_than": DropIfOlderThan,
    "fresh_tail_only": lambda _: FreshTailOnly(),
}


def policy(name: str, max_staleness: int = 0) -> TokenPolicy:
    """The policy of that name; raises ConfigError with the names there are."""
    if name not in POLICIES:
        raise ConfigError("policy", name, "there is no such staleness policy", f"Choose one of {sorted(POLICIES)}")
    return POLICIES[name](max_staleness)
