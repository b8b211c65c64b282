"""The group of a prompt's sessions in an agent loop worker: what of it is trained, and how it ended.

A session that fails, or leaves nothing to train, is left out of its group. A group in which fewer sessions than
`needed` are left is dropped as a whole, and verl replaces its prompt by another.

Invariants:
- Each session ends once, and the last one hands the group over, which nothing interrupts: all its rows are put, or
  none.
- Each session of the gateway is acknowledged once, as kept or as dropped.
- A group that is deferred while sessions of it run puts nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass, field, replace

from seamless_verl.agent_loops.queue_writer import QueueWriter
from seamless_verl.agent_loops.rows import Row, SessionOutputs
from seamless_verl.agents.outcome import AgentStatus
from seamless_verl.data_plane.group_notifier import GroupEnd
from seamless_verl.errors import GroupDroppedError, shorten
from seamless_verl.trajectory.account import DropReason

logger = logging.getLogger(__name__)
ERROR, UNTRAINABLE, STUCK = "error", "untrainable", "stuck"
"""Kinds of failed sessions, beside the values of AgentStatus, and of TaskState for tasks that no runner did."""
MAX_ERROR_CHARS = 4000  # characters of an error that are passed on
SAID_EVERY_S = 60.0  # a warning of one kind, in one process: a mistake of a reward function concerns every session
warned: dict[str, tuple[float, int]] = {}
"""By kind: when a warning of it was logged last, and how many were left out since."""


def warn_of(kind: str, message: str, *, exc_info: bool = False) -> None:
    """Logs a warning unless one of this kind was logged a short time ago; the next one says how many were left out."""
    now, (at, left_out) = time.monotonic(), warned.get(kind, (-SAID_EVERY_S, 0))
    if now - at < SAID_EVERY_S:
        warned[kind] = at, left_out + 1
        return
    warned[kind] = now, 0
    more = f" ({left_out} more as {kind} since the last line)" if left_out else ""
    logger.warning("%s%s", message, more, exc_info=exc_info or None)


@dataclass
class SessionGroup:
    """The `total` sessions of the prompt `uid`, of which `needed` must have something to train.

    A group that was reopened has `first` earlier sessions in TransferQueue already. `prompt` is what a sampler knows
    the prompt by, empty without one.
    """

    writer: QueueWriter
    uid: str
    _: KW_ONLY
    total: int = 0
    needed: int = 0
    partition: str = "train"
    first: int = 0
    prompt: str = ""
    ended: int = 0
    trainable: int = 0
    cancelled: bool = False
    deferred: bool = False  # and cancelled: its step has enough groups, and its prompt begins again later
    kept: bool | None = None  # None until it was handed over
    stuck: dict[asyncio.Task[object], str] = field(default_factory=dict)  # sessions that are ended, and why
    began: float = field(default_factory=time.monotonic)
    running: dict[asyncio.Task[object], str] = field(default_factory=dict)
    """of its sessions, until they are handed over, with the gateway's ids of those that this process opened"""
    errors: list[str] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)  # sessions by kind, rewarded ones among them
    limited: int = 0  # sessions whose agents ended at a limit, which is no failure
    rows: list[Row] = field(default_factory=list)
    sessions: list[SessionOutputs] = field(default_factory=list)

    @property
    def validation(self) -> bool:
        return self.partition == "val"

    @property
    def dropped_as(self) -> DropReason:
        """What tokens of its sessions are counted as, when they are dropped with it."""
        return DropReason.DEFERRED if self.deferred else DropReason.SESSION

    @property
    def stopped_as(self) -> DropReason:
        """What tokens of one of its sessions are counted as, when that is stopped."""
        stuck = asyncio.current_task() in self.stuck
        return DropReason.TIMED_OUT if stuck and not self.cancelled else self.dropped_as

    def defer(self) -> bool:
        """Gives the group up while sessions of it run; False if all have ended, so that it is handed over."""
        if self.ended == self.total:
            return False
        self.cancelled = self.deferred = True
        return True

    def opened(self, session_id: str) -> None:
        """This task, one of its sessions, has opened this one of the gateway."""
        task = asyncio.current_task()
        if task in self.running:
            self.running[task] = session_id

    def end_stuck(self, session_id: str, reason: str) -> int:
        """Ends this session, as a failed one, if it runs here; returns how many that are. The others go on."""
        tasks = [task for task, name in self.running.items() if name == session_id]
        for task in tasks:
            self.stuck[task] = reason
            task.cancel()
        return len(tasks)

    def add(self, outputs: SessionOutputs | None, rows: list[Row]) -> None:
        """A session has ended with these rows; `outputs` if it is one of the gateway."""
        if outputs is not None:
            self.sessions.append(outputs)
        self.rows += rows
        self.trainable += bool(rows)

    def session_failed(self, session: object, error: BaseException, kind: str) -> None:
        """Counts a session that is left out of its group, and logs why, in one line for many of a kind."""
        self.failed[kind] += 1
        text = f"{type(error).__name__}: {error}" if kind == ERROR else str(error)
        self.errors.append(text[-MAX_ERROR_CHARS:])
        warn_of(kind, f"session {session} of prompt {self.uid} failed and is left out: {shorten(text)}")

    def failure_rewarded(self, kind: str, error: str) -> None:
        """Counts a session that failed and has the reward of a failure."""
        self.failed[kind] += 1
        self.errors.append(error[-MAX_ERROR_CHARS:])

    def failed_whole(self, error: Exception) -> None:
        """An error of the whole prompt is why its group is dropped."""
        text = f"the group of prompt {self.uid} failed: {type(error).__name__}: {error}"
        self.errors.append(text[-MAX_ERROR_CHARS:])
        logger.error("%s", shorten(text), exc_info=error)

    async def session_ended(self) -> None:
        """The last session hands the group over; raises GroupDroppedError if too few of its sessions can be trained."""
        self.ended += 1
        if self.ended == self.total:
            await self.hand_over()

    async def hand_over(self) -> None:
        """Writes the rows, each once, or drops them; acknowledges the sessions to their data planes."""
        rows, self.rows, sessions, self.sessions = self.rows, [], self.sessions, []
        self.kept = False
        try:
            if self.cancelled:
                return
            if self.trainable < self.needed:
                last = shorten(self.errors[-1]) if self.errors else "none failed"
                raise GroupDroppedError(self.uid, self.trainable, self.total, self.needed, last)
            if rows:
                await self.writer.put(rows, self.partition)
            self.kept = True
        except GroupDroppedError as error:
            warn_of("groups", str(error))
            self.errors.append(str(error))
            raise
        except Exception as error:  # raised again; the journal's notes of the sessions have it, too
            self.errors.append(f"{type(error).__name__}: {error}"[-MAX_ERROR_CHARS:])
            raise
        finally:
            reason = "" if self.kept else shorten(self._why_dropped())
            validation, dropped = self.validation, self.dropped_as
            handed_notes = [
                session.note(self.uid, reason, validation=validation, dropped=dropped) for session in sessions
            ]
            acknowledged = zip(sessions, handed_notes, strict=True)
            await asyncio.gather(*(session.acknowledge(bool(self.kept), note) for session, note in acknowledged))

    def _why_dropped(self) -> str:
        if self.deferred:
            return "its step had enough groups"
        return self.errors[-1] if self.errors else "its task was cancelled, by an agent loop or as its worker ended"

    def end(self) -> GroupEnd:
        """How the group ended, for the data plane.

        Running out of time is no failure here, where `on_timeout` rewards it: the agent was at work.
        """
        failed, kinds = sum(self.failed.values()), dict(self.failed)
        error = None if self.kept else self._why_dropped()
        none_succeeded = failed - kinds.get(AgentStatus.TIMED_OUT, 0) == self.total and not self.validation
        cause = self.errors[-1] if none_succeeded and self.errors else None
        ended = GroupEnd(error, cause, self.total, failed, kinds, self.limited)
        return replace(ended, validation=self.validation, deferred=self.deferred)


GROUP: ContextVar[SessionGroup] = ContextVar("group")
"""The group of the prompt that this task, or the one that started it, belongs to."""
