"""Which generated tokens of a sequence are trained: staleness policies, and what is done with tokens of grammars.

Staleness is the trainer's weight version minus the token's; 0 is on-policy. A policy is a frozen object
without state. It reads a view and returns a mask, so the trainer and the simulator run the same object.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from seamless_verl.errors import ConfigError
from seamless_verl.trajectory.records import Grammar

BoolArray: TypeAlias = NDArray[np.bool_]


class GrammarTokens(StrEnum):
    """What is done with tokens that were sampled under a grammar (JSON schema, required or strict tool)."""

    TRAIN_ALL = "train_all"  # they are trained like all others
    MASK_FORCED = "mask_forced"
    """those are masked for which the grammar allowed no other token: the model did not choose them"""
    MASK_ALL = "mask_all"  # all of them are masked

    def forbids(self, labels: NDArray[np.uint8]) -> BoolArray:
        """Bool [R]: true for each token that is not trained, by its `Grammar` uint8 [R]."""
        least = {self.TRAIN_ALL: len(Grammar), self.MASK_FORCED: Grammar.FORCED, self.MASK_ALL: Grammar.CHOSEN}
        return labels >= least[self]


@dataclass(frozen=True, eq=False)
class TokenView:
    """A response as a policy sees it: versions int32 [R], generated bool [R].

    Tokens that are not trained for another reason do not count as generated. A version has a meaning only where
    `generated` is true.
    """

    versions: NDArray[np.int32]
    generated: BoolArray
    trainer_version: int

    def older_than(self, limit: int) -> BoolArray:
        """Bool [R]: true for generated tokens whose staleness exceeds the limit."""
        return self.generated & (self.trainer_version - self.versions > limit)


class TokenPolicy(Protocol):
    """The interface of a staleness policy."""

    def decide(self, view: TokenView) -> BoolArray:
        """Bool [R]: true for each token to train. Only generated tokens may be true."""

    @property
    def bounded(self) -> bool:
        """Whether it has a bound, in weight versions."""

    @property
    def oldest(self) -> int | None:
        """How many versions old the oldest tokens are that it may train; None for any."""


@dataclass(frozen=True)
class _Bounded:
    """A policy with a bound, in weight versions."""

    bounded: ClassVar[bool] = True
    max_staleness: int

    def __post_init__(self) -> None:
        if self.max_staleness < 0:
            raise ConfigError("max_staleness", self.max_staleness, "no token is newer than 0", "Give 0 or more")

    @property
    def oldest(self) -> int:
        return self.max_staleness


@dataclass(frozen=True)
class TrainAll:
    """Trains every generated token."""

    bounded: ClassVar[bool] = False
    oldest: ClassVar[int | None] = None

    def decide(self, view: TokenView) -> BoolArray:
        return view.generated


@dataclass(frozen=True)
class MaskOlderThan(_Bounded):
    """Masks the tokens whose staleness exceeds the bound."""

    def decide(self, view: TokenView) -> BoolArray:
        return view.generated & ~view.older_than(self.max_staleness)


@dataclass(frozen=True)
class DropIfOlderThan(_Bounded):
    """Drops a whole sequence if the staleness of any of its tokens exceeds the bound."""

    def decide(self, view: TokenView) -> BoolArray:
        return view.generated & (not view.older_than(self.max_staleness).any())


@dataclass(frozen=True)
class FreshTailOnly:
    """Trains only the generated tokens after the last one that is not on-policy."""

    bounded: ClassVar[bool] = False
    oldest: ClassVar[int | None] = 0

    def decide(self, view: TokenView) -> BoolArray:
        off_policy = np.flatnonzero(view.generated & (view.versions != view.trainer_version))
        mask = view.generated.copy()
        mask[: int(off_policy[-1]) + 1 if off_policy.size else 0] = False
        return mask


POLICIES: dict[str, Callable[[int], TokenPolicy]] = {
    "train_all": lambda _: TrainAll(),
    "mask_older_than": MaskOlderThan,
    "drop_if_older_than": DropIfOlderThan,
    "fresh_tail_only": lambda _: FreshTailOnly(),
}


def make_policy(name: str, max_staleness: int = 0) -> TokenPolicy:
    """The policy of this name; raises ConfigError with the known names if there is none."""
    if name not in POLICIES:
        raise ConfigError("policy", name, "there is no such staleness policy", f"Choose one of {sorted(POLICIES)}")
    return POLICIES[name](max_staleness)


def parse_policy(text: str) -> TokenPolicy:
    """The policy of `NAME` or `NAME:k`; raises ConfigError with the way out."""
    name, colon, bound = text.partition(":")
    if not colon:
        return make_policy(name)
    if not bound.isdecimal():
        way_out = "Give a whole number of versions, 0 or more, as in mask_older_than:1"
        raise ConfigError("--policy", text, f"{bound!r} is no bound", way_out)
    policy = make_policy(name, int(bound))
    if not policy.bounded:
        raise ConfigError("--policy", text, f"{name} takes no bound", f"Give {name} alone, or a policy with a bound")
    return policy
