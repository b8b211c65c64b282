"""What a session hands over when it ends, the account of its tokens, and how long the journal keeps it."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from seamless_verl.data_plane.settings import SessionSettings
from seamless_verl.errors import JournalError
from seamless_verl.journal import CompactionResult, GroupDecided, GroupOutcome, HandOverBegun, SqliteJournal
from seamless_verl.trajectory.account import Account, DropReason
from seamless_verl.trajectory.policies import TrainAll
from seamless_verl.trajectory.sequences import SequenceLimits, TrainingSequence, assemble, why_untrained
from seamless_verl.trajectory.session import Closed, SessionRecord
from seamless_verl.trajectory.turns import TurnNote, turn_notes

logger = logging.getLogger(__name__)
NO_ROUTES = (
    "the routes of its tokens are not all on record: an engine returned none, or the journal deleted them. Look into"
    " the replicas' logs, and raise seamless.gateway.journal_gib if it resumes from far back"
)
DAY_S, GIB = 24 * 3600.0, 1 << 30
RESULT = "agent"  # in the note of a hand-over's begin: how the agent ended


@dataclass(frozen=True)
class AgentResult:
    """How an agent ended, as its session's hand-over records it: an AgentStatus, and the reward that it returned."""

    status: str
    reward: float | None = None


def result_of(note: Mapping[str, Any]) -> AgentResult | None:
    """The result that the note of a hand-over's begin has; None in journals of earlier releases."""
    return AgentResult(**note[RESULT]) if RESULT in note else None


@dataclass(frozen=True)
class FinishedSession:
    """The result of a session: sequences to train, rewards by name, turns, and the account of its tokens.

    `untrained` is why there is no sequence, empty if there is one; `closed` is why the session was closed.
    `trained_turns` are those of the sequences, by id, `images` the files of the sequences' images, by sha256.
    """

    sequences: list[TrainingSequence]
    rewards: dict[str, float]
    turns: int
    account: dict[str, float] = field(default_factory=dict)
    untrained: str = ""
    trained_turns: Mapping[str, TurnNote] = field(default_factory=dict)
    images: Mapping[str, bytes] = field(default_factory=dict)
    closed: Closed = Closed.FINISHED


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
    """What the journal keeps of a hand-over: why it was dropped, or its agent failed, and its rewards; the tokens of
    one that was dropped are counted under `dropped`.
    """

    uid: str = ""
    reason: str = ""
    rewards: Mapping[str, float] = field(default_factory=dict)
    validation: bool = False
    dropped: DropReason = DropReason.SESSION
    scored: tuple[float, float] | None = None
    """for traces: when the computation of its score began and ended, in seconds since the epoch"""

    def as_dict(self, *, kept: bool) -> dict[str, Any]:
        """Plain JSON values; empty ones are left out."""
        rewards = {name: value for name, value in self.rewards.items() if math.isfinite(value)}
        values = {"dropped": "" if kept else str(self.dropped), "reason": self.reason, "rewards": rewards}
        return {"kept": kept, **{name: value for name, value in values.items() if value}}


NO_NOTE = HandedNote()


class SessionAccounts:
    """Owned state, of this process alone: the account of the sessions that were acknowledged or dropped, those that
    were handed over and not acknowledged, and what was acknowledged of prompts whose outcome is not known yet.

    A session is counted once: when it is acknowledged or dropped.
    """

    def __init__(self, settings: SessionSettings) -> None:
        self._grammar, self._limit_keys = settings.grammar, settings.limit_keys
        self._limits, self._routes = SequenceLimits(settings.max_sequence), settings.routes
        self.total = Account()
        self.unacknowledged: dict[str, Unacknowledged] = {}
        self._queued: Counter[str] = Counter()  # tokens acknowledged, by prompt, until its outcome is known
        self._tool_calls = 0  # in the replies of acknowledged sessions

    def finished(self, record: SessionRecord, version: int) -> FinishedSession:
        """The result of a closed session for a trainer of `version`; its account waits for its acknowledgement."""
        assembly = assemble(record, TrainAll(), version, self._limits, self._grammar)
        tool_calls = sum(tool_calls_of(turn.reply) for turn in record.turns)
        self.unacknowledged[record.session_id] = Unacknowledged(record.uid, assembly.account, tool_calls)
        sequences, untrained = assembly.sequences, ""
        if self._routes and not record.validation and any(sequence.routes is None for sequence in sequences):
            sequences, untrained = [], NO_ROUTES
        elif not sequences:
            untrained = why_untrained(record.tree, self._limits, self._limit_keys)
        trained = [turn_id for sequence in sequences for turn_id in sequence.turn_ids]
        return FinishedSession(
            sequences,
            dict(record.rewards),
            len(record.turns),
            assembly.account.metrics(),
            untrained,
            turn_notes(record.tree, trained, record.rewards),
            {digest: record.images[digest] for sequence in sequences for digest in sequence.images},
            record.closed or Closed.FINISHED,
        )

    def begun(self, session_id: str, result: AgentResult | None = None) -> HandOverBegun:
        """The event, with what readers of the journal need to count the session's tokens as they are counted here."""
        counted = {"limits": asdict(self._limits), "grammar": str(self._grammar)}
        return HandOverBegun(session_id, counted | ({} if result is None else {RESULT: asdict(result)}))

    def dropped(self, record: SessionRecord, reason: DropReason) -> None:
        """A session ended, and nothing of it is trained."""
        assembly = assemble(record, TrainAll(), 0, self._limits, self._grammar)
        self.total += assembly.account.discarded(reason)

    def acknowledged(self, session_id: str, kept: bool, note: HandedNote) -> None:
        """A hand-over has ended; a repetition counts nothing, nor does a session that an earlier process closed."""
        held = self.unacknowledged.pop(session_id, Unacknowledged())
        self._tool_calls += held.tool_calls
        if not kept or note.validation:
            self.total += held.account.discarded(DropReason.VALIDATION if kept else note.dropped)
            return
        self.total += held.account
        self._queued[note.uid] += held.account.trained

    def handed_over(self, uids: Collection[str]) -> list[str]:
        """Of these prompts, those with a session that was acknowledged as kept, and whose outcome is not known yet."""
        return [uid for uid in uids if uid in self._queued]

    def decided(self, groups: Sequence[GroupDecided]) -> None:
        """What became of groups: tokens of those that were dropped are not trained."""
        for one in groups:
            tokens = self._queued.pop(one.uid, 0)
            if one.outcome is not GroupOutcome.TRAINED:
                deferred = one.outcome is GroupOutcome.DEFERRED
                self.total = self.total.with_dropped(tokens, DropReason.DEFERRED if deferred else DropReason.GROUP)

    def checked_metrics(self) -> dict[str, float]:
        """Tokens and calls of tools; raises IntegrityError unless generated = trained + dropped."""
        self.total.check_integrity()
        return self.total.metrics() | {"sessions/tool_calls": float(self._tool_calls)}


def tool_calls_of(reply: Mapping[str, Any]) -> int:
    message = reply.get("message")
    return len(message.get("tool_calls") or ()) if isinstance(message, Mapping) else 0


class Retention:
    """Deletes sessions that were handed over more than `days` ago, and the oldest while the file is above `gib`.

    None is no bound. Nobody waits for a deletion. `needed` gives the sessions that stay in any case, None while they
    are not known: then nothing is deleted. Invariants: `task` is the only one that compacts; a clock that jumps makes
    no session older. `check` is called in the event loop.
    """

    def __init__(
        self,
        journal: SqliteJournal,
        days: float | None,
        gib: float | None,
        needed: Callable[[], Collection[str] | None] = frozenset,
    ) -> None:
        self.journal, self.days, self.gib, self._needed = journal, days, gib, needed
        self._began = time.time() - time.monotonic()
        self.deleted, self.used_bytes = 0, 0
        self.task: asyncio.Task[CompactionResult] | None = None

    def check(self) -> None:
        """Takes the result of the last deletion, or raises its error, and begins the next unless one is under way."""
        if self.task is not None:
            if not self.task.done():
                return
            self._take(self.task.result())
        self.task = None
        if (needed := self._needed()) is not None:
            self.task = asyncio.create_task(self._compact(frozenset(needed)))

    def _take(self, result: CompactionResult) -> None:
        self.used_bytes = result.used_bytes
        if result.sessions and not self.deleted:
            logger.warning(
                "the journal deletes its oldest sessions: above seamless.gateway.journal_gib=%s, or %s days old",
                self.gib,
                self.days,
            )
        self.deleted += result.sessions

    async def _compact(self, needed: Collection[str]) -> CompactionResult:
        now = min(time.time(), self._began + time.monotonic())
        before = 0.0 if self.days is None else now - self.days * DAY_S
        return await self.journal.compact(before, None if self.gib is None else int(self.gib * GIB), needed)

    async def end(self) -> None:
        """After the journal was closed, which ends a deletion that is under way."""
        if self.task is not None:
            with suppress(JournalError):  # it says that the journal is closed
                await self.task

    def metrics(self) -> dict[str, float]:
        return {"journal/bytes": float(self.used_bytes), "journal/deleted": float(self.deleted)}
