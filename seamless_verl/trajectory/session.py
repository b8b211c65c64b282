"""The record of one session: its turns, its rewards, and why it was closed.

Invariants:
- Turns are in the order in which they were recorded, and a turn id names one turn. Recording the same turn again
  changes nothing; another turn under the same id is refused.
- A session is open until it is closed, once, for one reason. A closed session accepts rewards but no turns.
- The tokens that the turns generated are those of the tree's generated nodes.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum

from seamless_verl.errors import SessionClosedError, TurnConflictError
from seamless_verl.trajectory.images import images_of
from seamless_verl.trajectory.records import Turn
from seamless_verl.trajectory.tree import PlacedTurn, Tree

REWARD = "reward"


class Closed(StrEnum):
    """Why a session was closed."""

    FINISHED = "finished"  # its agent ended it, or returned
    EXPIRED = "expired"  # its lifetime was over
    LIMIT = "limit_reached"  # its turns, tokens or context were used up
    FAILED = "failed"  # its agent broke
    TOOL_FAILED = "tool_failed"  # a tool or the sandbox of its agent broke
    ENGINE_FAILED = "engine_failed"  # the gateway or an engine failed a call of its agent
    TIMED_OUT = "timed_out"  # its agent was ended at its time limit
    RUNNER_LOST = "runner_lost"
    """the runner that worked on it was lost, or gave it up; its task begins again in another session"""
    ABANDONED = "abandoned"  # no agent resumed it, or its prompt is no longer needed


@dataclass(eq=False)
class SessionRecord:
    """One session. `rewards` are by name; a reward posted again replaces the earlier one.

    A `validation` trains nothing. `images` are the files of the images in its prompts, by sha256 in hex.
    """

    uid: str
    session_id: str
    _: KW_ONLY
    validation: bool = False
    tree: Tree = field(default_factory=Tree)
    rewards: dict[str, float] = field(default_factory=dict)
    images: dict[str, bytes] = field(default_factory=dict)
    closed: Closed | None = None

    @property
    def name(self) -> str:
        return f"{self.uid}/{self.session_id}"

    @property
    def is_open(self) -> bool:
        return self.closed is None

    @property
    def turns(self) -> list[PlacedTurn]:
        return list(self.tree.turns.values())

    def add_turn(self, turn: Turn) -> PlacedTurn:
        """Records a turn that has ended; recording the same turn again changes nothing.

        Raises:
            SessionClosedError: the turn is new, but the session is closed.
            TurnConflictError: a turn of this id is on record with other tokens.
        """
        placed = self.tree.turns.get(turn.turn_id)
        if placed is not None:
            self._check_same(placed, turn)
            return placed
        if self.closed is not None:
            raise SessionClosedError(self.name, self.closed, "turns")
        return self.tree.insert(turn)

    def post_reward(self, value: float, name: str = REWARD) -> None:
        """Sets a reward, in an open or a closed session; raises ValueError unless it is finite."""
        if not math.isfinite(value):
            raise ValueError(f"session {self.name}: {name}={value!r} is no reward; post a finite number")
        self.rewards[name] = float(value)

    def close(self, reason: Closed) -> None:
        """Closes the session; closing it again for the same reason changes nothing.

        Raises:
            SessionClosedError: it was closed for another reason.
        """
        if self.closed not in (None, reason):
            raise SessionClosedError(self.name, str(self.closed), f"other end ({reason})")
        self.closed = reason

    def check_integrity(self) -> None:
        """Raises IntegrityError if the turns and the tree disagree about the generated tokens."""
        self.tree.check_integrity()

    def _check_same(self, placed: PlacedTurn, turn: Turn) -> None:
        if placed.finish != turn.finish:
            raise TurnConflictError(self.name, turn.turn_id, "end")
        if placed.generated_ids() != turn.generated_ids:
            raise TurnConflictError(self.name, turn.turn_id, "reply")
        if placed.prompt_ids() != turn.prompt_ids or images_of(placed.request) != turn.images:
            raise TurnConflictError(self.name, turn.turn_id, "prompt")
