"""The sessions of a job's gateway: opened, recorded in the journal, and taken by the agent loop that opened them.

A session that was closed is given again to whoever asks again, the same from the journal as from memory, until its
agent loop says that TransferQueue has its sequences. Their keys there are a function of prompt and sample, so that
one that was put twice is there once. Once that was said it is given to nobody: one given again after it was trained
would be trained twice, and one never given again before TransferQueue had all of it would be lost. So the journal
notes a hand-over before the session is given, and its end only on the agent loop's word.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from seamless_verl.data_plane.restart import borrowed
from seamless_verl.errors import ConfigError, JournalOrderError
from seamless_verl.journal import CallEnded, HandedOver, HandOverBegun, SessionClosed, SqliteJournal, Stage
from seamless_verl.journal.recovery import closed_session
from seamless_verl.rollout.call import Calls
from seamless_verl.trajectory.account import Account, DropReason
from seamless_verl.trajectory.policies import TrainAll
from seamless_verl.trajectory.records import Finish
from seamless_verl.trajectory.sequences import SequenceLimits, TrainingSequence, assemble
from seamless_verl.trajectory.session import Closed, SessionRecord

KEPT_S = 7 * 24 * 3600.0  # a session that was trained can be read for so long,
KEPT_BYTES = 4 << 30  # or until the journal holds more than this
LOCKED_S, LOOK_S = 10.0, 0.05  # for so long an earlier life, just killed, may still hold the journal


@dataclass(frozen=True)
class SessionSettings:
    """`options` are those of `vllm serve`; lengths in tokens bound what a session leaves to train.

    `doorstep` names the actor that keeps the listening socket, at `port`, over the gateway's death.
    """

    model: str
    journal: str
    port: int = 0
    options: Sequence[str] = ()
    longest_prompt: int | None = None
    longest_response: int | None = None
    doorstep: str | None = None


@dataclass(frozen=True)
class FinishedSession:
    """What a session leaves: sequences to train, rewards by name, turns, and the account of its tokens."""

    sequences: list[TrainingSequence]
    rewards: dict[str, float]
    turns: int
    account: dict[str, float] = field(default_factory=dict)


class Sessions:
    """Owns the gateway, its journal and the account of all sessions' tokens; `on_failure` hears what ends them."""

    def __init__(self, settings: SessionSettings, calls: Calls, *, on_failure: Callable[[BaseException], None]) -> None:
        self.settings, self.calls, self.on_failure = settings, calls, on_failure
        self.journal: SqliteJournal
        self.ended: dict[str, asyncio.Event] = {}  # of the sessions that were opened or restored, until they are taken
        self.leaving: set[str] = set()
        self.account = Account()  # of the sessions that were handed over
        self.assembled: dict[str, Account] = {}  # of those that were closed and not yet handed over

    async def start(self, *, again: bool) -> None:
        """Listen; `again` after a death, with the sessions that were open then.

        Raises:
            ConfigError: another run writes the journal.
            JournalError: it cannot be read.
        """
        # Here, not in every process that knows of the plane: vLLM's serving classes take seconds to import.
        from seamless_verl.gateway.recorder import JournalRecorder
        from seamless_verl.gateway.recovery import GatewayRecovery
        from seamless_verl.gateway.server import Gateway, GatewaySettings

        self.journal = await self._journal()
        left = await asyncio.to_thread(self.journal.restore)
        self.recorder = JournalRecorder(self.journal, on_closed=lambda session_id: self.ended[session_id].set())
        if again:
            self.ended = {one.session_id: asyncio.Event() for one in left}
        else:  # of an earlier run, whose agents have ended with it
            for one in left:
                cut = [CallEnded(call.call_id, Finish.CANCELLED) for call in one.calls if call.cut]
                await self.journal.append(*cut, SessionClosed(one.session_id, Closed.ABANDONED))
        settings = self.settings
        options = GatewaySettings(
            settings.model,
            secrets.token_urlsafe(),
            options=settings.options,
            host=ray.util.get_node_ip_address(),
            port=settings.port,
        )
        self.gateway = Gateway(
            options,
            source=self.calls,
            recorder=self.recorder,
            restoring=GatewayRecovery(self.journal, self.recorder),
            listener=None if settings.doorstep is None else await borrowed(settings.doorstep),
            on_failure=self.on_failure,
        )
        await self.gateway.start()

    async def _journal(self) -> SqliteJournal:
        limit = time.monotonic() + LOCKED_S
        while True:
            try:
                return SqliteJournal(Path(self.settings.journal))
            except ConfigError:
                if time.monotonic() > limit:
                    raise
                await asyncio.sleep(LOOK_S)  # the system tells nobody that a dead process's lock is free

    async def stop(self) -> None:
        await self.gateway.stop()
        self.journal.close()

    async def open(self, body: dict[str, Any]) -> dict[str, Any]:
        """One whose answer was lost with an earlier life expires, for nobody knows its key."""
        opened = await self.gateway.admin.open(body)
        self.ended[opened["session_id"]] = asyncio.Event()
        return opened

    def forget(self) -> None:
        """Let the table drop sessions that have left, once the last request in them has been answered."""
        for session_id in [one for one in self.leaving if not self.gateway.table.get(one).running]:
            self.gateway.table.forget(session_id)
            self.leaving.remove(session_id)

    async def close(self, session_id: str, reason: str, version: int) -> FinishedSession:
        """What the session leaves, as the trainer of `version` sees it; the same until it was handed over.

        Raises:
            JournalOrderError: it is unknown, or was handed over.
        """
        record = await self._closed(session_id, reason)
        limits = SequenceLimits(self.settings.longest_prompt, self.settings.longest_response)
        assembly = assemble(record, TrainAll(), version, limits)
        with suppress(JournalOrderError):  # it was given before, and is given again
            await self.journal.append(HandOverBegun(session_id))
        self.assembled[session_id] = assembly.account
        return FinishedSession(assembly.sequences, dict(record.rewards), len(record.turns), assembly.account.metrics())

    async def _closed(self, session_id: str, reason: str) -> SessionRecord:
        """Its record: from memory the first time in this life, else from the journal."""
        if (ended := self.ended.get(session_id)) is not None:
            await self.gateway.admin.close(session_id, reason)
            await ended.wait()  # on record, also when it expired a moment ago
        if self.ended.pop(session_id, None) is None:
            return await asyncio.to_thread(closed_session, self.journal, session_id)
        self.leaving.add(session_id)
        self.forget()
        return self.recorder.take(session_id)

    async def handed(self, session_id: str, kept: bool) -> None:
        """Its sequences are where they are trained from, or, not `kept`, were left out: nobody is given it again.

        Again changes nothing.

        Raises:
            JournalOrderError: it was not closed.
        """
        try:
            await self.journal.append(HandedOver(session_id, time.time()))
        except JournalOrderError:
            if await asyncio.to_thread(self.journal.stage, session_id) is not Stage.HANDED:
                raise
        account = self.assembled.pop(session_id, Account())  # empty when it comes again, or an earlier life closed it
        self.account += account if kept else account.discarded(DropReason.SESSION)

    async def settle(self) -> dict[str, float]:
        """Metrics of all sessions' tokens, after their books have been found to close; old ones are compacted."""
        self.gateway.table.check_integrity()
        self.account.check_integrity()
        await self.journal.compact(time.time() - KEPT_S, KEPT_BYTES)
        return self.account.metrics()
