"""Tail batching: which prompts a step begins, so that a few long ones hold no other step. Pure.

At `max_staleness` 0 a step waits for its longest sample while engines run nearly empty. With tail batching (RollPacker,
arXiv 2509.21009) a step begins a few more prompts than it trains and trains the groups that finish first. The prompts
left over are deferred: what they generated is dropped, and they begin again in a later step that is made of deferred
prompts only, without extra ones, and waits for all of them. Dropping alone would train short prompts more often. So a
step fills up with deferred prompts before it draws from the next epoch, or where the run would end without them.

Invariants:
- Every prompt drawn from the data is outstanding, deferred, trained, or dropped for a reason of its own.
- No more prompts are deferred than the steps to come train.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Draw:
    """The prompts to begin: `fresh` ones from the data, and those of the deferred ones that begin `again`."""

    fresh: int
    again: tuple[str, ...] = ()


class TailBatching:
    """Decides on a step's prompts, and remembers the deferred ones by name, in the order in which they were deferred.

    `extra` is how many prompts a step begins beyond those it trains. With 0 nothing is deferred; prompts that an
    earlier run deferred then begin before fresh ones. `drawn` counts the prompts that were drawn from the data.
    """

    def __init__(self, extra: int = 0) -> None:
        self.extra = extra
        self.deferred: list[str] = []
        self.drawn = 0
        self.begun_again = self.tail_steps = 0

    def decide(self, needed: int, to_train: int, epoch: int, begins: bool = True) -> Draw:
        """The draw where a step lacks `needed` prompts beyond its outstanding ones; those that begin again are deferred
        no longer.

        `to_train` are the needed ones and those of all later steps of the run, `epoch` is the size of the data set. The
        draw at a step's begin, `begins`, may take more than are needed; a later one replaces dropped groups.
        """
        fresh_left = self._fresh_allowed(to_train, epoch)
        waiting = len(self.deferred)
        again = needed if not self.extra or (begins and waiting >= needed) else max(0, needed - fresh_left)
        again = min(waiting, again)
        self.tail_steps += bool(begins and again == needed and self.extra)
        names, self.deferred = tuple(self.deferred[:again]), self.deferred[again:]
        self.begun_again += again
        wanted = needed - again + (self.extra if begins and not again else 0)
        return Draw(max(needed - again, min(wanted, self._fresh_allowed(to_train, epoch))), names)

    def drew(self, prompts: int) -> None:
        """So many prompts were drawn from the data."""
        self.drawn += prompts

    def defer(self, names: Sequence[str]) -> None:
        """The step has its groups: these prompts are left over, and begin again later."""
        assert not set(names) & set(self.deferred), names
        self.deferred += names

    def keep(self, names: Sequence[str]) -> None:
        """After a resume: these are the prompts whose data is there. Those that the state lacks begin again, too."""
        self.deferred = [name for name in self.deferred if name in names]
        self.deferred += [name for name in names if name not in self.deferred]

    def _fresh_allowed(self, to_train: int, epoch: int) -> int:
        """Fresh prompts that leave room for every deferred one in this epoch and this run."""
        left = -self.drawn % epoch
        if not left and not self.deferred:
            left = epoch
        return max(0, min(left, to_train - len(self.deferred)))

    def metrics(self) -> dict[str, float]:
        return {
            "seamless/tail/deferred": float(len(self.deferred)),
            "seamless/tail/begun_again": float(self.begun_again),
            "seamless/tail/steps": float(self.tail_steps),
        }

    def state_dict(self) -> dict[str, Any]:
        counts = {"drawn": self.drawn, "begun_again": self.begun_again, "tail_steps": self.tail_steps}
        return {"deferred": list(self.deferred), **counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues with a checkpoint's deferred prompts, also under another number of extra ones."""
        self.deferred = [str(name) for name in state["deferred"]]
        self.drawn, self.begun_again = int(state["drawn"]), int(state["begun_again"])
        self.tail_steps = int(state["tail_steps"])


def extra_prompts(share: float | None, batch: int) -> int:
    """Extra prompts of a step of `batch` prompts: that share of them, at least one; none without a share."""
    return 0 if share is None else max(1, math.ceil(share * batch - 1e-9))
