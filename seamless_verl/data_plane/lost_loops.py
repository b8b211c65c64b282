"""What agent loops left behind when their process died, for the ones that begin their prompts again in its place.

It is what a resumed run does with the sessions of an earlier start, within one start: sessions that had ended are taken
up, leases that runners hold go on, and an agent that ran in the process, or below it, begins again in another session,
where it repeats the calls that had ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from seamless_verl.data_plane.earlier_sessions import run_of
from seamless_verl.data_plane.finished_sessions import HandedNote
from seamless_verl.journal import EndedSession, Stage, StoredSession
from seamless_verl.trajectory.account import DropReason
from seamless_verl.trajectory.session import Closed

if TYPE_CHECKING:
    from seamless_verl.data_plane.runner_tasks import RunnerTasks
    from seamless_verl.data_plane.sessions import Sessions

WHY = "its agent loop worker died"


@dataclass(frozen=True)
class Left:
    """The prompts `uids` of lost agent loops. Those of `complete` had put all of their rows; those of `unwanted` do not
    begin again, and what they generated is dropped for these reasons."""

    uids: Collection[str]
    complete: Collection[str] = ()
    unwanted: Mapping[str, DropReason] = field(default_factory=dict)

    def note(self, stored: StoredSession) -> HandedNote:
        """Of a session that had ended and is not taken up."""
        if stored.uid in self.complete:
            return HandedNote(stored.uid, rewards=stored.rewards)
        return HandedNote(stored.uid, WHY, dropped=self.unwanted.get(stored.uid, DropReason.SESSION))


async def leave(sessions: Sessions, tasks: RunnerTasks, left: Left) -> None:
    """Ends, or keeps for the next ones, what these loops have left. A repetition changes nothing."""
    handing = await of_stage(sessions, left, Stage.HANDING)
    await sessions.settled()
    await tasks.release(left.uids, left.unwanted, {*handing, *sessions.accounts.unacknowledged})
    for session_id, uid in [one for one in sessions.awaited().items() if one[1] in left.uids]:
        if tasks.has(session_id) or session_id not in sessions.closed:  # it may have ended during a drop before it
            continue
        if uid not in left.unwanted:
            sessions.lose(session_id)
        await sessions.drop(session_id, Closed.ABANDONED, left.unwanted.get(uid, DropReason.SESSION), WHY)
    held = [session_id for session_id, one in sessions.accounts.unacknowledged.items() if one.uid in left.uids]
    for session_id in dict.fromkeys([*await of_stage(sessions, left, Stage.HANDING), *held]):
        stored = await asyncio.to_thread(sessions.journal.read, session_id)
        if stored is None or (run_of(stored) or "") != sessions.earlier.run:
            continue
        if stored.uid in left.complete and sessions.earlier.waits(session_id):  # nobody asked for it: it has no rows
            continue
        again = stored.uid not in left.complete and stored.uid not in left.unwanted
        if not (again and sessions.earlier.offer(ended(stored))):
            await sessions.acknowledge(session_id, stored.uid in left.complete, left.note(stored))
            tasks.forget(session_id)


async def of_stage(sessions: Sessions, left: Left, stage: Stage) -> list[str]:
    """The sessions of these prompts at this stage, by the journal: a restarted data plane has no list of its own."""
    stages = await asyncio.to_thread(sessions.journal.stages_of, left.uids)
    return [session_id for session_id, found in stages.items() if found is stage]


def ended(stored: StoredSession) -> EndedSession:
    """A closed session without its calls."""
    segments = [segment for call in stored.calls for segment in call.segments]
    versions = [segment.version for segment in segments]
    return EndedSession(
        stored.session_id,
        stored.uid,
        stored.settings,
        stored.stage,
        stored.reason or "",
        sum(len(segment) for segment in segments),
        min(versions, default=None),
        max(versions, default=None),
        stored.handing,
        stored.handed,
        stored.group,
    )
