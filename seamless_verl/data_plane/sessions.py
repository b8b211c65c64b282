"""The sessions of a data plane's gateway: opened, recorded in the journal, and handed over to their agent loop.

A closed session is returned as often as its agent loop asks for it, the same from the journal as from memory, until
the agent loop acknowledges that TransferQueue has its sequences. Their keys there are a function of prompt and sample,
so that a sequence that is put twice is stored once. An acknowledged session is not returned any more, or it could be
trained twice. One that was acknowledged before TransferQueue had all of it would be lost. So the journal records the
begin of a hand-over before the session is returned, and its end only on the agent loop's acknowledgement.
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
KEPT_S = 7 * 24 * 3600.0  # for which the journal keeps a session after its hand-over,
KEPT_BYTES = 4 << 30  # or until the journal is larger than this
LOCKED_S, RETRY_S = 10.0, 0.05  # an earlier process that was just killed may hold the journal's lock for so long


@dataclass(frozen=True)
class SessionSettings:
    """Settings of a gateway. `options` are those of `vllm serve`; `max_prompt` and `max_response` bound a training
    sequence, in tokens.

    `socket_holder` names the actor that holds the listening socket, at `port`, while the gateway is down.
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
    """The result of a session: sequences to train, rewards by name, turns, and the account of its tokens."""

    sequences: list[TrainingSequence]
    rewards: dict[str, float]
    turns: int
    account: dict[str, float] = field(default_factory=dict)


class Sessions:
    """Owns the gateway, its journal and the account of all tokens; `on_failure` is called with an error of these."""

    def __init__(self, settings: SessionSettings, calls: Calls, *, on_failure: Callable[[BaseException], None]) -> None:
        self.settings, self.calls, self.on_failure = settings, calls, on_failure
        self.journal: SqliteJournal
        self.closed: dict[str, asyncio.Event] = {}  # of sessions opened or restored, until they are handed over
        self.finishing: set[str] = set()  # sessions handed over whose last requests may still run
        self.account = Account()  # of acknowledged sessions
        self.unacknowledged: dict[str, Account] = {}  # of sessions handed over and not yet acknowledged
        self.discards: set[asyncio.Task[None]] = set()  # of sessions that nobody trains

    async def start(self, *, restarted: bool) -> None:
        """Starts the gateway; `restarted` after a death, it continues the sessions that were open then.

        Raises:
            ConfigError: another run writes the journal.
            JournalError: it cannot be read.
        """
        # Imported here, since vLLM's serving classes take seconds to import and few processes need them.
        from seamless_verl.gateway.admin import write_admin_file
        from seamless_verl.gateway.recorder import JournalRecorder
        from seamless_verl.gateway.recovery import GatewayRecovery
        from seamless_verl.gateway.server import Gateway, GatewaySettings

        self.journal = await self._open_journal()
        open_sessions = await asyncio.to_thread(self.journal.restore)
        self.recorder = JournalRecorder(self.journal, on_closed=self._session_closed)
        if restarted:
            self.closed = {session.session_id: asyncio.Event() for session in open_sessions}
        else:  # sessions of an earlier run, whose agents have ended with it
            for session in open_sessions:
                cut = [CallEnded(call.call_id, Finish.CANCELLED) for call in session.calls if call.interrupted]
                await self.journal.append(*cut, SessionClosed(session.session_id, Closed.ABANDONED))
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
                await asyncio.sleep(RETRY_S)  # nothing notifies of a lock that a dead process frees

    @property
    def admin_file(self) -> Path:
        """Address and key of the admin API, beside the journal; only this user can read it."""
        return Path(f"{self.settings.journal}.admin.json")

    async def stop(self) -> None:
        from seamless_verl.gateway.admin import remove_admin_file

        remove_admin_file(self.admin_file)
        await self.gateway.stop()
        await asyncio.gather(*self.discards)
        self.journal.close()

    def _session_closed(self, session_id: str) -> None:
        """Of the gateway's recorder. A session that was opened over HTTP has no agent loop that would close it here."""
        if (closed := self.closed.get(session_id)) is not None:
            closed.set()
            return
        discard = asyncio.create_task(self._discard(session_id))
        self.discards.add(discard)
        discard.add_done_callback(self.discards.discard)

    async def _discard(self, session_id: str) -> None:
        """Ends the hand-over of a session that nobody trains, so that the journal keeps it no longer than others."""
        try:
            record = self._take(session_id)
            await self.journal.append(HandOverBegun(session_id), HandedOver(session_id, time.time()))
        except Exception as error:  # no task awaits this one
            self.on_failure(error)
        else:
            self.account += assemble(record, TrainAll(), 0).account.discarded(DropReason.SESSION)

    async def open(self, body: dict[str, Any]) -> dict[str, Any]:
        """Opens a session. One whose reply was lost with an earlier process expires, since no agent has its key."""
        opened = await self.gateway.admin.open(body)
        self.closed[opened["session_id"]] = asyncio.Event()
        return opened

    def forget_finished(self) -> None:
        """Drops sessions that were handed over from the gateway's table, once no request of them runs."""
        table = self.gateway.table
        for session_id in [name for name in self.finishing if not table.get(name).running]:
            table.forget(session_id)
            self.finishing.remove(session_id)

    async def close(self, session_id: str, reason: str, version: int) -> FinishedSession:
        """The session's result for a trainer of `version`; the same at each call until it is acknowledged.

        Raises:
            JournalOrderError: the session is unknown, or was acknowledged.
        """
        record = await self._close(session_id, reason)
        limits = SequenceLimits(self.settings.max_prompt, self.settings.max_response)
        assembly = assemble(record, TrainAll(), version, limits)
        with suppress(JournalOrderError):  # the hand-over has begun before
            await self.journal.append(HandOverBegun(session_id))
        self.unacknowledged[session_id] = assembly.account
        return FinishedSession(assembly.sequences, dict(record.rewards), len(record.turns), assembly.account.metrics())

    async def _close(self, session_id: str, reason: str) -> SessionRecord:
        """Closes the session; returns its record, from memory the first time in this process, else from the journal."""
        if (closed := self.closed.get(session_id)) is not None:
            await self.gateway.admin.close(session_id, reason)
            await closed.wait()  # until it is in the journal, also if it expired a moment ago
        if self.closed.pop(session_id, None) is None:
            return await asyncio.to_thread(read_closed_session, self.journal, session_id)
        return self._take(session_id)

    def _take(self, session_id: str) -> SessionRecord:
        """A closed session's record; the gateway forgets the session as soon as no request of it runs."""
        self.finishing.add(session_id)
        self.forget_finished()
        return self.recorder.take(session_id)

    async def acknowledge(self, session_id: str, kept: bool) -> None:
        """Ends the hand-over: the session's sequences are in TransferQueue, or, not `kept`, were dropped.

        The session is not returned any more. A second call changes nothing.

        Raises:
            JournalOrderError: the session was not closed.
        """
        try:
            await self.journal.append(HandedOver(session_id, time.time()))
        except JournalOrderError:
            if await asyncio.to_thread(self.journal.stage, session_id) is not Stage.HANDED:
                raise
        account = self.unacknowledged.pop(session_id, Account())  # empty if repeated, or closed by an earlier process
        self.account += account if kept else account.discarded(DropReason.SESSION)

    async def checked_metrics(self) -> dict[str, float]:
        """Metrics of all sessions' tokens, after a check of their conservation laws; also deletes old sessions."""
        self.gateway.table.check_integrity()
        self.account.check_integrity()
        await self.journal.compact(time.time() - KEPT_S, KEPT_BYTES)
        return self.account.metrics()
