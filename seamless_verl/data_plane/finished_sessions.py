"""What a session hands over when it ends, and what the journal keeps of that. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from seamless_verl.data_plane.earlier_sessions import AgentResult
from seamless_verl.trajectory.account import Account, DropReason
from seamless_verl.trajectory.sequences import TrainingSequence
from seamless_verl.trajectory.turns import TurnNote


@dataclass(frozen=True)
class FinishedSession:
    """The result of a session: sequences to train, rewards by name, turns, and the account of its tokens.

    `untrained` is why there is no sequence, empty if there is one. `trained_turns` are those of the sequences, by id.
    """

    sequences: list[TrainingSequence]
    rewards: dict[str, float]
    turns: int
    account: dict[str, float] = field(default_factory=dict)
    untrained: str = ""
    trained_turns: Mapping[str, TurnNote] = field(default_factory=dict)


@dataclass(frozen=True)
class Unacknowledged:
    """Of a session that was handed over and not yet acknowledged: its prompt's uid, its tokens, its calls of tools."""

    uid: str = ""
    account: Account = field(default_factory=Account)
    tool_calls: int = 0


@dataclass(frozen=True)
class TakenUpSession:
    """A session that an earlier start of the run ended: how its agent ended, and its result, as `close` returned it."""

    session_id: str
    result: AgentResult
    session: FinishedSession


@dataclass(frozen=True)
class HandedNote:
    """What the journal keeps of a session's hand-over: why it was dropped or its agent failed, and all its rewards.

    The tokens of one that was dropped are counted under `dropped`.
    """

    uid: str = ""
    reason: str = ""
    rewards: Mapping[str, float] = field(default_factory=dict)
    validation: bool = False
    dropped: DropReason = DropReason.SESSION

    def as_dict(self, *, kept: bool) -> dict[str, Any]:
        """Plain JSON values; empty ones are left out."""
        rewards = {name: value for name, value in self.rewards.items() if math.isfinite(value)}
        values = {"dropped": "" if kept else str(self.dropped), "reason": self.reason, "rewards": rewards}
        return {"kept": kept, **{name: value for name, value in values.items() if value}}


NO_NOTE = HandedNote()
