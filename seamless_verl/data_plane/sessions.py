"""The sessions of a data plane's gateway: opened, recorded in the journal, and handed over to their agent loop.

A closed session is returned as often as its agent loop asks for it, the same from the journal as from memory, until the
agent loop acknowledges that TransferQueue has its sequences. Their keys there are a function of prompt and sample, so
that a sequence that is put twice is stored once. Nothing is trained twice or lost, because the journal records the
begin of a hand-over before the session is returned, and its end only on the acknowledgement.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Any

import ray

from seamless_verl.client.admin_file import AdminFile, kept_runner_key
from seamless_verl.data_plane.earlier_sessions import SAMPLE, EarlierSessions, Place, place_of, run_of
from seamless_verl.data_plane.finished_sessions import (
    NO_NOTE,
    AgentResult,
    FinishedSession,
    HandedNote,
    Retention,
    SessionAccounts,
    TakenUpSession,
    result_of,
)
from seamless_verl.data_plane.lost_sessions import LostSessions
from seamless_verl.data_plane.restart import held_sockets
from seamless_verl.data_plane.settings import SessionSettings
from seamless_verl.data_plane.traces import SessionTraces, exporter_of
from seamless_verl.errors import ConfigError, JournalOrderError
from seamless_verl.gateway.api_errors import ApiError
from seamless_verl.gateway.calls import INTERRUPTED
from seamless_verl.journal import (
    RUN,
    CallEnded,
    GroupDecided,
    GroupOutcome,
    HandedOver,
    SessionClosed,
    SqliteJournal,
    Stage,
    StoredSession,
)
from seamless_verl.journal.reader import read_closed_session
from seamless_verl.journal.stored import rebuild_record
from seamless_verl.rollout.call import Calls
from seamless_verl.trajectory.account import DropReason
from seamless_verl.trajectory.records import Finish
from seamless_verl.trajectory.session import Closed, SessionRecord

if TYPE_CHECKING:
    from seamless_verl.gateway.middleware import OnOutsideRefusal, ServeRunner

logger = logging.getLogger(__name__)
LOCKED_S, RETRY_S = 10.0, 0.05  # an earlier process that was just killed may hold the journal's lock for so long
NO_LOOP = DropReason.SESSION, "no agent loop waited for it"


class Sessions:
    """Owns the gateway, its journal and the accounts of tokens; `on_failure` is called with an error of these."""

    def __init__(self, settings: SessionSettings, calls: Calls, *, on_failure: Callable[[BaseException], None]) -> None:
        self.settings, self.calls, self.on_failure = settings, calls, on_failure
        self.journal: SqliteJournal
        self.retention: Retention
        self.closed: dict[str, asyncio.Event] = {}  # of awaited sessions, until they are handed over
        self.finishing: set[str] = set()  # sessions handed over whose last requests may still run
        self.accounts = SessionAccounts(settings)
        self.asked: Counter[asyncio.Task[Any]] = Counter()  # tasks in which an agent loop opens, closes or acknowledges
        self.discards: set[asyncio.Task[None]] = set()  # of sessions that nobody trains
        self.unused = dict[Place, str]()  # open when an earlier process died, without a call, by their place
        self.earlier: EarlierSessions
        self.lost: LostSessions
        self.traces = SessionTraces(exporter_of(os.environ))
        calls.on_ended = self.traces.call_ended

    async def read_journal(self) -> Sequence[StoredSession]:
        """Opens the journal; returns the sessions that an earlier process left open."""
        self.journal = await self._open_journal()
        self.lost = LostSessions(self.journal)
        self.earlier = EarlierSessions(self.journal, self._end_earlier, self.lost.add, routes=self.settings.routes)
        bounds = self.settings.journal_days, self.settings.journal_gib
        self.retention = Retention(self.journal, *bounds, self.earlier.needed)
        return await asyncio.to_thread(self.journal.restore)

    async def start(
        self,
        open_sessions: Sequence[StoredSession],
        kept: Collection[str] = (),
        *,
        restarted: bool,
        serve_runner: ServeRunner | None = None,
        on_outside_refusal: OnOutsideRefusal | None = None,
    ) -> None:
        """Starts the gateway; `restarted` after a death, it continues the sessions that were open then.

        Of the sessions that an earlier start left open the `kept` ones continue. `serve_runner` replies to runners.
        """
        # Imported here, since vLLM's serving classes take seconds to import and few processes need them.
        from seamless_verl.gateway.recorder import JournalRecorder
        from seamless_verl.gateway.recovery import is_awaited
        from seamless_verl.gateway.server import Gateway, GatewaySettings

        self.recorder = JournalRecorder(self.journal, on_closed=self._session_closed, routes=self.settings.routes)
        if restarted:
            awaited = [session for session in open_sessions if is_awaited(session)]
            self.closed = {session.session_id: asyncio.Event() for session in awaited}
            self.unused = {place_of(session): session.session_id for session in awaited if not session.calls}
            await self.earlier.restore()
            await self._discard_closed()
        else:
            self.closed = {session_id: asyncio.Event() for session_id in kept}
            await self._end_earlier_run([one for one in open_sessions if one.session_id not in kept])
        runner_key = await asyncio.to_thread(kept_runner_key, self.settings.journal, self.settings.runner_key)
        self.settings = settings = replace(self.settings, runner_key=runner_key)
        options = GatewaySettings(
            settings.model,
            settings.admin_key,
            options=settings.options,
            host=ray.util.get_node_ip_address(),
            port=settings.port,
            rules=settings.rules,
            public_address=settings.public_address,
            runner_key=settings.runner_key,
        )
        self.gateway = Gateway(
            options,
            source=self.calls,
            recorder=self.recorder,
            journal=self.journal,
            listeners=[] if settings.socket_holder is None else await held_sockets(settings.socket_holder),
            on_failure=self.on_failure,
            serve_runner=serve_runner,
            on_outside_refusal=on_outside_refusal,
        )
        self.calls.paused_time.now = self.gateway.table.clock
        self.gateway.table.paused_s = self.calls.paused_time.total
        await self.gateway.start()
        AdminFile(self.gateway.url, settings.admin_key, settings.runner_key, gethostname(), os.getpid()).write(
            self.admin_file
        )
        logger.info("The gateway's admin API: address and key are in %s", self.admin_file)

    async def _end_earlier_run(self, open_sessions: Sequence[StoredSession]) -> None:
        """Ends what an earlier start left, whose agents and loops have ended with it, so that it can be compacted.

        Sessions that a run opened and closed wait for `EarlierSessions.begin`: it may be the same run.
        """
        for session in open_sessions:
            running = [call.call_id for call in session.calls if call.interrupted]
            cut = [CallEnded(call_id, Finish.CANCELLED, {INTERRUPTED: True}) for call_id in running]
            await self.journal.append(*cut, SessionClosed(session.session_id, Closed.ABANDONED))
        for session_id, stage in await asyncio.to_thread(self.journal.not_handed_over):
            stored = await asyncio.to_thread(self.journal.read, session_id)
            if stored is not None and run_of(stored) is None:
                await self._end_earlier(session_id, stage, None)

    async def _discard_closed(self) -> None:
        """Ends the hand-over of sessions without an agent loop that had just been closed when a process died."""
        for session_id, stage in await asyncio.to_thread(self.journal.not_handed_over):
            stored = await asyncio.to_thread(self.journal.read, session_id) if stage is Stage.CLOSED else None
            if stored is not None and not stored.settings["awaited"]:
                await self._drop(rebuild_record(stored), *NO_LOOP)

    async def _end_earlier(self, session_id: str, stage: Stage, reason: str | None) -> None:
        """Ends the hand-over of a session of an earlier start.

        Without a reason, one whose hand-over has begun may be in its run's checkpoint: what becomes of it is not known.
        """
        begun = [self.accounts.begun(session_id)] if stage is Stage.CLOSED else []
        known = stage is Stage.CLOSED or reason is not None
        note = HandedNote(reason=reason or "its run ended before it").as_dict(kept=False) if known else {}
        await self.journal.append(*begun, HandedOver(session_id, time.time(), note))

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
        return AdminFile.beside(self.settings.journal)

    async def stop(self) -> None:
        self.admin_file.unlink(missing_ok=True)
        await self.gateway.stop()
        await asyncio.gather(*self.discards)
        self.journal.close()
        await self.retention.end()
        await self.traces.close()

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
            await self._drop(self._take(session_id), *NO_LOOP)
        except Exception as error:  # no task awaits this one
            self.on_failure(error)

    async def drop(self, session_id: str, reason: Closed, dropped: DropReason, why: str) -> None:
        """Ends a session whose agent is gone: nothing of it is trained, and its tokens are counted for this reason.

        One that was handed over, or dropped, at this moment is left.
        """
        self.earlier.dropping(session_id)
        try:
            await self._drop(await self._close(session_id, reason), dropped, why)
        except (ApiError, JournalOrderError):  # the gateway may have forgotten it as well
            if await asyncio.to_thread(self.journal.stage, session_id) is not Stage.HANDED:
                raise

    async def _drop(self, record: SessionRecord, dropped: DropReason, why: str) -> None:
        note = HandedNote(record.uid, why, dropped=dropped).as_dict(kept=False)
        ended = HandedOver(record.session_id, time.time(), note)
        await self.journal.append(self.accounts.begun(record.session_id), ended)
        self.accounts.dropped(record, dropped)
        self.traces.acknowledged(record.session_id, False, NO_NOTE, time.time())

    def lose(self, session_id: str, newest: int | None = None) -> None:
        """The agent of an open session is gone, and begins again in another one, which may repeat its calls."""
        session = self.gateway.table.get(session_id)
        self.lost.add(session_id, session.uid, {"metadata": session.metadata}, newest)

    async def open(self, body: dict[str, Any]) -> dict[str, Any]:
        """Opens a session; in the place of a lost one its agent's calls are answered from the record (`lost`).

        One whose reply was lost with an earlier process is asked for again, and ended: no agent has its key.
        """
        own = {RUN: self.earlier.run} if self.earlier.run else {}
        with self._asked():
            metadata, recorded_calls = await self.lost.take(body)
            opened = await self.gateway.admin.open({**body, "metadata": metadata | own}, awaited=True)
            session = self.gateway.table.get(opened["session_id"])
            session.recorded_calls = recorded_calls
            self.closed[opened["session_id"]] = asyncio.Event()
            self.traces.opened(opened["session_id"], str(body["uid"]), session.opened_at)
            self.calls.group_began(str(body["uid"]))
            await self._end_unused((str(body["uid"]), str(metadata.get(SAMPLE))))
            return opened

    async def _end_unused(self, place: Place) -> None:
        """Ends the session of an earlier process at this place, unless its agent has called."""
        unused = self.unused.pop(place, None)
        if unused in self.closed and not self.gateway.table.get(unused).requests:
            await self.drop(unused, Closed.ABANDONED, DropReason.SESSION, "nobody had its key")

    @contextmanager
    def _asked(self) -> Iterator[None]:
        task = asyncio.current_task()
        assert task is not None
        self.asked[task] += 1
        try:
            yield
        finally:
            self.asked[task] -= 1
            if not self.asked[task]:
                del self.asked[task]

    async def settled(self) -> None:
        """Waits for what agent loops have asked for until now, also loops that are gone."""
        if others := self.asked.keys() - {asyncio.current_task()}:
            await asyncio.wait(others)

    def awaited(self) -> dict[str, str]:
        """The sessions that an agent loop waits for, or closed a moment ago, each with the uid of its prompt."""
        table = self.gateway.table
        return {session_id: table.get(session_id).uid for session_id in self.closed}

    def forget_finished(self) -> None:
        """Drops sessions that were handed over from the gateway's table, once no request of them runs."""
        table = self.gateway.table
        for session_id in [name for name in self.finishing if not table.get(name).running]:
            table.forget(session_id)
            self.finishing.remove(session_id)

    async def close(
        self, session_id: str, reason: str, version: int, result: AgentResult | None = None
    ) -> FinishedSession:
        """The session's result for a trainer of `version`; the same at each call until it is acknowledged.

        `result` is how its agent ended. Raises JournalOrderError if the session is unknown, or was acknowledged.
        """
        with self._asked():
            record = await self._close(session_id, reason)
            try:
                await self.journal.append(self.accounts.begun(session_id, result))
            except JournalOrderError as error:
                if error.stage != Stage.HANDING:  # it was dropped at this moment; else it is asked for again
                    raise
            return self.accounts.finished(record, version)

    async def take_up(self, uid: str, sample: str, submitted: int, version: int) -> TakenUpSession | None:
        """The session of an earlier start at this place, for a prompt submitted in this step; None if there is none."""
        stored = await self.earlier.take(uid, sample, submitted)
        result = None if stored is None else result_of(stored.handing)
        if stored is None or result is None:
            return None
        record = rebuild_record(replace(stored, rewards=stored.posted))
        return TakenUpSession(stored.session_id, result, self.accounts.finished(record, version))

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
        self.calls.session_ended(session_id)
        self.finishing.add(session_id)
        self.forget_finished()
        record = self.recorder.take(session_id)
        self.traces.closed(session_id, str(record.closed))
        return record

    async def acknowledge(self, session_id: str, kept: bool, note: HandedNote = NO_NOTE) -> None:
        """Ends the hand-over: the session's sequences are in TransferQueue, or, not `kept`, were dropped.

        A second call changes nothing. Raises JournalOrderError if the session was not closed.
        """
        with self._asked():
            try:
                await self.journal.append(HandedOver(session_id, time.time(), note.as_dict(kept=kept)))
            except JournalOrderError:
                if await asyncio.to_thread(self.journal.stage, session_id) is not Stage.HANDED:
                    raise
                if not kept:
                    await self.earlier.drop(session_id, note.reason)
            self.earlier.acknowledged(session_id, kept)
            self.accounts.acknowledged(session_id, kept, note)
            self.traces.acknowledged(session_id, kept, note, time.time())

    async def record_groups(self, groups: Sequence[GroupDecided]) -> None:
        """What became of groups: into the journal, and the tokens of those that were dropped into the account."""
        await self.journal.append(*groups)
        uids = {one.uid for one in groups}
        decided = {one.uid for one in groups if one.outcome is not GroupOutcome.DEFERRED}
        await self._end_left({one.uid: one.outcome for one in groups})
        await self.earlier.end_unwanted(decided)
        self.earlier.decided(uids)
        for place in [place for place in self.unused if place[0] in decided]:
            await self._end_unused(place)
        self.lost.forget(uids)
        self.accounts.decided(groups)
        self.traces.decided(groups, time.time())

    async def _end_left(self, outcomes: Mapping[str, GroupOutcome]) -> None:
        """Drops sessions of groups that were decided whose loops are gone, and that no other has taken up."""
        left = [(one, uid) for one, (uid, _) in self.earlier.offered.items() if uid in outcomes]
        for session_id, uid in left:
            deferred = outcomes[uid] is GroupOutcome.DEFERRED
            reason = DropReason.DEFERRED if deferred else DropReason.SESSION
            await self.acknowledge(session_id, False, HandedNote(uid, "its group went on without it", dropped=reason))

    async def checked_metrics(self) -> dict[str, float]:
        """Metrics of all sessions, after a check of their conservation laws; the journal is bounded beside it."""
        self.gateway.table.check_integrity()
        self.retention.check()
        tokens, own = self.accounts.checked_metrics(), self.lost.metrics() | self.retention.metrics()
        return tokens | self.gateway.metrics() | self.earlier.metrics() | own
