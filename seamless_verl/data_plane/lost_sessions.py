"""Sessions whose agents were lost with their run, agent loop worker or runner, until others begin in their places.

The next agent begins in another session at the same place: the same prompt, and the same number in its group. That
session gets the lost one's recorded calls, and answers its agent with them (`gateway/calls.py`). Nothing is kept over a
restart of the data plane: what was lost before it begins without them.

Owned state: the lost session of each place that nobody has begun in again, and how much was repeated.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from seamless_verl.data_plane.earlier_sessions import SAMPLE, STEP, Place, run_of
from seamless_verl.data_plane.finished_sessions import HandedNote
from seamless_verl.gateway.calls import RepeatableCalls
from seamless_verl.journal import SqliteJournal, Stage, StoredSession
from seamless_verl.journal.stored import is_validation
from seamless_verl.trajectory.account import DropReason
from seamless_verl.trajectory.session import Closed

if TYPE_CHECKING:
    from seamless_verl.data_plane.runner_tasks import RunnerTasks
    from seamless_verl.data_plane.sessions import Sessions

AGAIN = "again"
"""In a session's metadata: which session it begins `of` again, how many `times` its place has, and, after a stop of the
run, the `newest` version of weights of which it was given tokens."""
# The calls may be what an agent dies of: with its worker or runner it gets them again once, and after a stop of the
# whole run, of which it is seldom the cause, as long as its place has not begun again twice.
MAX_TIMES, MAX_TIMES_OF_STOPS = 1, 2
WORKER_DIED = "its agent loop worker died"


@dataclass(frozen=True)
class LostSession:
    """A lost session; tokens of weights after `newest` are not given again, None for no bound."""

    session_id: str
    newest: int | None


class LostSessions:
    """The lost sessions of one data plane, whose calls are in its journal."""

    def __init__(self, journal: SqliteJournal) -> None:
        self.journal = journal
        self._by_place: dict[Place, LostSession] = {}
        self._counts: Counter[str] = Counter()

    def add(self, session_id: str, uid: str, settings: Mapping[str, Any], newest: int | None = None) -> None:
        """An agent will begin again in the place of this session, which was opened with these settings."""
        most = MAX_TIMES if newest is None else MAX_TIMES_OF_STOPS
        if not is_validation(settings) and again_of(settings).get("times", 0) < most:
            self._by_place[uid, str(settings.get("metadata", {}).get(SAMPLE))] = LostSession(session_id, newest)

    async def take(self, opening: Mapping[str, Any]) -> tuple[dict[str, Any], RepeatableCalls | None]:
        """For a session that is opened so: its metadata, and the calls that it may repeat; each is given once."""
        metadata = dict(opening.get("metadata", {}))
        lost = self._by_place.pop((str(opening.get("uid")), str(metadata.get(SAMPLE))), None)
        step = metadata.get(STEP)
        if lost is None or (step is None and lost.newest is not None):  # it does not say how old its tokens may be
            return metadata, None
        sessions = await asyncio.to_thread(self._read, lost)
        if not sessions:
            return metadata, None
        calls = RepeatableCalls(sessions, oldest=0 if step is None else step - 1, counts=self._counts)
        stored = sessions[0][0]
        times = again_of(stored.settings).get("times", 0) + bool(stored.calls)
        again = {"of": lost.session_id, "times": times}
        bound = {} if lost.newest is None else {"newest": lost.newest}
        return metadata | {AGAIN: again | bound}, calls if len(calls) else None

    def _read(self, lost: LostSession) -> list[tuple[StoredSession, int | None]]:
        """The session, the one that it began again, and so on, as far as the journal still has them, with their bounds.

        Weights that were gone for a session are gone for those after it, also where their number was reached again.
        """
        sessions: list[tuple[StoredSession, int | None]] = []
        session_id, newest = lost.session_id, lost.newest
        while session_id and (stored := self.journal.read(session_id)) is not None:
            sessions.append((stored, newest))
            again = again_of(stored.settings)
            session_id = again.get("of", "")
            newest = min((bound for bound in (newest, again.get("newest")) if bound is not None), default=None)
        return sessions

    def bound(self, newest: int) -> None:
        """The run goes on from the weights of this version: what was lost before has none of newer ones to give."""
        for place, lost in self._by_place.items():
            bounded = newest if lost.newest is None else min(newest, lost.newest)
            self._by_place[place] = replace(lost, newest=bounded)

    def forget(self, uids: Collection[str]) -> None:
        """The groups of these prompts are decided: nobody begins in them again."""
        for place in [place for place in self._by_place if place[0] in uids]:
            del self._by_place[place]

    def metrics(self) -> dict[str, float]:
        calls, generated = self._counts["calls"], self._counts["tokens"]
        return {"sessions/repeated_calls": float(calls), "sessions/repeated_tokens": float(generated)}


def again_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Which session one with these settings begins again, and how often its place has; empty for one that does not."""
    again: dict[str, Any] = settings.get("metadata", {}).get(AGAIN, {})
    return again


async def end_left(
    sessions: Sessions,
    tasks: RunnerTasks,
    uids: Collection[str],
    complete: Collection[str] = (),
    unwanted: Mapping[str, DropReason] = MappingProxyType({}),
) -> None:
    """Ends what the lost loops of these prompts have left, or keeps it for the ones that begin the prompts again:
    sessions that had ended are taken up, leases go on, and an agent that ran in the process, or below it, begins again.

    Loops of `complete` had put all of their rows. Those of `unwanted` do not begin again, and what they generated is
    dropped for these reasons. A repetition changes nothing.
    """

    async def of_stage(stage: Stage) -> list[str]:  # by the journal: a restarted data plane has no list of its own
        stages = await asyncio.to_thread(sessions.journal.stages_of, uids)
        return [session_id for session_id, found in stages.items() if found is stage]

    handing = await of_stage(Stage.HANDING)
    await sessions.settled()
    await tasks.release(uids, unwanted, {*handing, *sessions.accounts.unacknowledged})
    for session_id, uid in [one for one in sessions.awaited().items() if one[1] in uids]:
        if tasks.has(session_id) or session_id not in sessions.closed:  # it may have ended during a drop before it
            continue
        if uid not in unwanted:
            sessions.lose(session_id)
        await sessions.drop(session_id, Closed.ABANDONED, unwanted.get(uid, DropReason.SESSION), WORKER_DIED)
    held = [session_id for session_id, one in sessions.accounts.unacknowledged.items() if one.uid in uids]
    for session_id in dict.fromkeys([*await of_stage(Stage.HANDING), *held]):
        stored = await asyncio.to_thread(sessions.journal.read, session_id)
        if stored is None or (run_of(stored) or "") != sessions.earlier.run:
            continue
        uid, whole = stored.uid, stored.uid in complete
        if whole and sessions.earlier.waits(session_id):  # nobody asked for it: it has no rows
            continue
        if not whole and uid not in unwanted and sessions.earlier.offer(stored.summary()):
            continue
        dropped = HandedNote(uid, WORKER_DIED, dropped=unwanted.get(uid, DropReason.SESSION))
        await sessions.acknowledge(session_id, whole, HandedNote(uid, rewards=stored.rewards) if whole else dropped)
        tasks.forget(session_id)
