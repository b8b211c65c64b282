"""The sessions of a data plane's gateway: opened, recorded in the journal, taken by the agent loop that opened them.

A session that was closed is given again to whoever asks again, the same from the journal as from memory, until its
agent loop acknowledges that TransferQueue has its sequences. Their keys there are a function of prompt and sample, so
that one that was put twice is there once. An acknowledged session is given to nobody: given again after it was
trained, it would be trained twice; acknowledged before TransferQueue had all of it, it would be lost. So the journal
records that a hand-over begins before the session is given, and its end only on the agent loop's acknowledgement.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from seamless_verl.data_plane.restart import held_socket
from seamless_verl.errors import ConfigError, JournalOrderError
from seamless_verl.journal import CallEnded, HandedOver, HandOverBegun, SessionClosed, SqliteJournal, Stage
from seamless_verl.journal.recovery import read_closed_session
from seamless_verl.rollout.call import Calls
from seamless_verl.trajectory.account import Account, DropReason
from seamless_verl.trajectory.policies import TrainAll
from seamless_verl.trajectory.records import Finish
from seamless_verl.trajectory.sequences import SequenceLimits, TrainingSequence, assemble
from seamless_verl.trajectory.session import Closed, SessionRecord

logger = logging.getLogger(__name__)
KEPT_S = 7 * 24 * 3600.0  # a session that was trained can be read for so long,
KEPT_BYTES = 4 << 30  # or until the journal holds more than this
LOCKED_S, RETRY_S = 10.0, 0.05  # an earlier process, just killed, may hold the journal for so long


@dataclass(frozen=True)
class SessionSettings:
    """`options` are those of `vllm serve`; lengths in tokens bound what a session leaves to train.

    `socket_holder` names the actor that keeps the listening socket, at `port`, over the gateway's death.
    """

    model: str
    journal: str
    admin_key: str
    port: int = 0
    options: Sequence[str] = ()
    max_prompt: int | None = None
    max_response: int | None = None
    socket_holder: str | None = None


@dataclass(frozen=True)
class FinishedSession:
    """What a session leaves: sequences to train, rewards by name, turns, and the account of its tokens."""

    sequences: list[TrainingSequence]
    rewards: dict[str, float]
    turns: int
    account: dict[str, float] = field(default_factory=dict)


class Sessions:
    """Owns the gateway, its journal and the account of all sessions' tokens; `on_failure` gets what ends them."""

    def __init__(self, settings: SessionSettings, calls: Calls, *, on_failure: Callable[[BaseException], None]) -> None:
        self.settings, self.calls, self.on_failure = settings, calls, on_failure
        self.journal: SqliteJournal
        self.closed: dict[str, asyncio.Event] = {}  # of the sessions that were opened or restored, until they are taken
        self.taken: set[str] = set()  # sessions that the gateway still answers requests of
        self.account = Account()  # of acknowledged sessions
        self.unacknowledged: dict[str, Account] = {}  # of sessions that were given and not yet acknowledged

    async def start(self, *, restarted: bool) -> None:
        """Listens; when `restarted` after a death, with the sessions that were open then.

        Raises:
            ConfigError: another run writes the journal.
            JournalError: it cannot be read.
        """
        # Not in every process that imports this module: vLLM's serving classes take seconds to import.
        from seamless_verl.gateway.admin import write_admin_file
        from seamless_verl.gateway.recorder import JournalRecorder
        from seamless_verl.gateway.recovery import GatewayRecovery
        from seamless_verl.gateway.server import Gateway, GatewaySettings

        self.journal = await self._open_journal()
        open_sessions = await asyncio.to_thread(self.journal.restore)
        self.recorder = JournalRecorder(self.journal, on_closed=lambda session_id: self.closed[session_id].set())
        if restarted:
            self.closed = {one.session_id: asyncio.Event() for one in open_sessions}
        else:  # of an earlier run, whose agents have ended with it
            for one in open_sessions:
                cut = [CallEnded(call.call_id, Finish.CANCELLED) for call in one.calls if call.interrupted]
                await self.journal.append(*cut, SessionClosed(one.session_id, Closed.ABANDONED))
        settings = self.settings
        options = GatewaySettings(
            settings.model,
            settings.admin_key,
            options=settings.options,
            host=ray.util.get_node_ip_address(),
            port=settings.port,
        )
        self.gateway = Gateway(
            options,
            source=self.calls,
            recorder=self.recorder,
            recovery=GatewayRecovery(self.journal, self.recorder),
            listener=None if settings.socket_holder is None else await held_socket(settings.socket_holder),
            on_failure=self.on_failure,
        )
        await self.gateway.start()
        write_admin_file(self.admin_file, url=self.gateway.url, key=settings.admin_key)
        logger.info("The gateway's admin API: address and key are in %s", self.admin_file)

    async def _open_journal(self) -> SqliteJournal:
        limit = time.monotonic() + LOCKED_S
        while True:
            try:
                return SqliteJournal(Path(self.settings.journal))
            except ConfigError:
                if time.monotonic() > limit:
                    raise
                await asyncio.sleep(RETRY_S)  # the system tells nobody that a dead process's lock is free

    @property
    def admin_file(self) -> Path:
        """Beside the journal; readable for this user alone."""
        return Path(f"{self.settings.journal}.admin.json")

    async def stop(self) -> None:
        from seamless_verl.gateway.admin import remove_admin_file

        remove_admin_file(self.admin_file)
        await self.gateway.stop()
        self.journal.close()

    async def open(self, body: dict[str, Any]) -> dict[str, Any]:
        """A session whose answer was lost with an earlier process expires: nobody knows its key."""
        opened = await self.gateway.admin.open(body)
        self.closed[opened["session_id"]] = asyncio.Event()
        return opened

    def forget_taken(self) -> None:
        """Drops taken sessions from the gateway's table, once the last request in them has been answered."""
        for session_id in [one for one in self.taken if not self.gateway.table.get(one).running]:
            self.gateway.table.forget(session_id)
            self.taken.remove(session_id)

    async def close(self, session_id: str, reason: str, version: int) -> FinishedSession:
        """What the session leaves, as the trainer of `version` sees it; the same until it is acknowledged.

        Raises:
            JournalOrderError: it is unknown, or was acknowledged.
        """
        record = await self._close(session_id, reason)
        limits = SequenceLimits(self.settings.max_prompt, self.settings.max_response)
        assembly = assemble(record, TrainAll(), version, limits)
        with suppress(JournalOrderError):  # it is given again
            await self.journal.append(HandOverBegun(session_id))
        self.unacknowledged[session_id] = assembly.account
        return FinishedSession(assembly.sequences, dict(record.rewards), len(record.turns), assembly.account.metrics())

    async def _close(self, session_id: str, reason: str) -> SessionRecord:
        """Its record: from memory the first time in this process, else from the journal."""
        if (closed := self.closed.get(session_id)) is not None:
            await self.gateway.admin.close(session_id, reason)
            await closed.wait()  # on record, also when it expired a moment ago
        if self.closed.pop(session_id, None) is None:
            return await asyncio.to_thread(read_closed_session, self.journal, session_id)
        self.taken.add(session_id)
        self.forget_taken()
        return self.recorder.take(session_id)

    async def acknowledge(self, session_id: str, kept: bool) -> None:
        """Its sequences are where they are trained from, or, not `kept`, were left out: it is never given again.

        Again changes nothing.

        Raises:
            JournalOrderError: it was not closed.
        """
        try:
            await self.journal.append(HandedOver(session_id, time.time()))
        except JournalOrderError:
            if await asyncio.to_thread(self.journal.stage, session_id) is not Stage.HANDED:
                raise
        account = self.unacknowledged.pop(session_id, Account())  # empty when repeated, or closed by an earlier process
        self.account += account if kept else account.discarded(DropReason.SESSION)

    async def checked_metrics(self) -> dict[str, float]:
        """Metrics of all sessions' tokens, after their conservation laws were checked; old sessions are deleted."""
        self.gateway.table.check_integrity()
        self.account.check_integrity()
        await self.journal.compact(time.time() - KEPT_S, KEPT_BYTES)
        return self.account.metrics()
