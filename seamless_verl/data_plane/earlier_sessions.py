"""The sessions of a run's earlier starts, which a resumed run takes up instead of running their agents again.

A checkpoint has the groups that had ended before it. Sessions that ended after it are in the journal alone. A resumed
run submits the same prompts under the same uids (`trainer/prompt_names.py`), and asks here before it begins a session.

Invariants:
- A session is taken up only if each of its tokens is of weights that the resumed run descends from, and within the
  staleness bound of its prompt: submitted in step p, and resumed at version k, it has versions from p - 1 to k.
- Weights newer than k are gone. What they generated ends here, so that no later start takes it up. The outcomes of
  groups in steps after k are undone, before the run gives steps of these numbers to others.
- What is not taken up ends in the journal, and is counted with its reason: at the begin of this start or of the next
  one, or when its group was decided without it.
- The journal deletes nothing that may be taken up, and nothing that was, until it is acknowledged (`needed`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any

from seamless_verl.data_plane.finished_sessions import result_of
from seamless_verl.journal import (
    BEGUN,
    RUN,
    UNDONE,
    GroupDecided,
    GroupOutcome,
    OutsideEvent,
    SessionSummary,
    SqliteJournal,
    Stage,
    StoredSession,
)
from seamless_verl.trajectory.session import Closed

logger = logging.getLogger(__name__)
SAMPLE = "session"  # in a session's metadata: its number in its group
STEP = "step"  # the same: the step in which its prompt was submitted


class BegunAgain(StrEnum):
    """Why a session of an earlier start is not taken up."""

    RUNNING = "running"
    """its agent had not ended"""
    NEWER_WEIGHTS = "newer_weights"
    """some of its tokens are of weights after the checkpoint, which are gone"""
    OLDER_WEIGHTS = "older_weights"
    """some of its tokens are too old for the step in which its prompt is submitted now"""
    NOTHING = "nothing"
    """it has no token to train, or its result is not on record"""
    UNWANTED = "unwanted"
    """its group was trained or dropped without it"""
    REPLACED = "replaced"
    """another session of the same place in its group ended later"""
    NO_ROUTES = "no_routes"
    """the routes of its tokens are not on record any more, and the run replays them"""


Place = tuple[str, str]  # a prompt's uid, and the number of the session in its group
# Ends a session whose hand-over has not ended: its id, its stage, and the reason, None for one of another run.
End = Callable[[str, Stage, str | None], Awaitable[None]]
# The session's id, the uid of its prompt, its settings, and the newest version.
Lose = Callable[[str, str, Mapping[str, Any], int | None], None]


class EarlierSessions:
    """Owned state: the sessions that may be taken up, by their place, and how many were and were not.

    `end` ends a session in the journal; `lose` is called with one whose agent begins again. With `routes` a session is
    taken up with the routes of all its tokens.
    """

    def __init__(self, journal: SqliteJournal, end: End, lose: Lose, *, routes: bool = False) -> None:
        self.journal, self._end, self._lose, self._routes = journal, end, lose, routes
        self.run, self.version, self.begun = "", -1, False
        self.on_record = False  # an earlier process of the data plane completed the begin of this start
        self.candidates: dict[Place, SessionSummary] = {}
        self.taken: dict[str, SessionSummary] = {}
        self.offered: dict[str, Place] = {}  # candidates of this start that are not acknowledged, by session
        self.handed_over: dict[str, str] = {}  # sessions that were, and are needed again, with their prompts
        self.dropped_here: set[str] = set()  # sessions that this process ends itself, while the run has not begun
        self.begun_again: Counter[BegunAgain] = Counter()
        self.lost_tokens: Counter[BegunAgain] = Counter()

    async def begin(self, run: str, version: int) -> None:
        """This start of the run goes on from the weights of `version`; called before it opens a session.

        A repetition changes nothing. It may follow a death of the data plane, and then completes what had begun.
        """
        if self.begun or (self.on_record and (run, version) == (self.run, self.version)):
            return
        self.run, self.version = run, version
        self.candidates.clear()
        self.handed_over.clear()
        for session in await self._undo_outcomes(await self._ended_sessions()):
            if session.session_id in self.dropped_here:
                continue
            replaced = self.candidates.get(place_of(session))
            if (why := self._judge(session)) is not None:
                await self._begin_again(session, why)
            elif replaced is not None and self.candidates[place_of(session)] is session:
                await self._begin_again(replaced, BegunAgain.REPLACED)
        await self.journal.append(OutsideEvent(RUN, run, {"version": version}, time.time()))
        self.begun = True
        self.dropped_here.clear()
        if self.candidates or self.begun_again:
            logger.warning("resumed at version %d: %s", version, self.summary())

    async def _ended_sessions(self) -> list[SessionSummary]:
        return [one for one in await asyncio.to_thread(self.journal.sessions) if one.stage is not Stage.OPEN]

    async def _undo_outcomes(self, sessions: Sequence[SessionSummary]) -> list[SessionSummary]:
        """The sessions without the outcomes of their groups that this start does not descend from."""
        own = [(one.uid, one.group) for one in sessions if run_of(one) == self.run]
        gone = {uid: group.step for uid, group in own if group is not None and group.step > self.version}
        await self.journal.append(
            *(GroupDecided(uid, GroupOutcome.UNDONE, step, at=time.time()) for uid, step in gone.items())
        )
        return [replace(one, group=None) if one.uid in gone else one for one in sessions]

    def dropping(self, session_id: str) -> None:
        """This process closes the session and ends its hand-over, as of a lease that expires before the run begins."""
        if not self.begun and not self.on_record:
            self.dropped_here.add(session_id)

    def offer(self, session: SessionSummary) -> bool:
        """A session of this start may be taken up, since its agent loop is gone; False if it can only begin again."""
        if session.validation or session.newest is None or result_of(session.handing) is None:
            return False
        self.candidates[place_of(session)] = session
        self.offered[session.session_id] = place_of(session)
        return True

    async def restore(self) -> None:
        """After a restart of the data plane: what the last start of this run may take up."""
        events = await asyncio.to_thread(self.journal.outside_events, BEGUN, RUN)
        if starts := [event for event in events if event.kind == RUN]:
            self.run, self.version = starts[-1].subject, int(starts[-1].detail["version"])
            kinds = [event.kind for event in events]
            self.on_record = kinds[-1] == RUN and BEGUN in kinds  # each start writes the one, and then the other
            for session in await self._ended_sessions():
                self._judge(session)

    def _judge(self, session: SessionSummary) -> BegunAgain | None:
        """Keeps a session that may be taken up; why not, for one that has not ended for good."""
        if run_of(session) != self.run:
            return None if session.stage is Stage.HANDED else BegunAgain.NOTHING
        if session.stage is Stage.HANDED and (session.validation or not session.handed.get("kept")):
            return None
        if session.group is not None and session.group.step <= self.version:
            return None  # what became of it is in the checkpoint
        if session.reason == Closed.ABANDONED:
            return BegunAgain.RUNNING
        if session.validation or session.newest is None or result_of(session.handing) is None:
            return BegunAgain.NOTHING
        if session.newest > self.version:
            return BegunAgain.NEWER_WEIGHTS
        self.candidates[place_of(session)] = session
        if session.stage is Stage.HANDED and session.group is None:
            self.handed_over[session.session_id] = session.uid
        return None

    def needed(self) -> Collection[str] | None:
        """The sessions that the journal must not delete; None until the run has begun, since they are not known."""
        return self.handed_over.keys() if self.begun or self.on_record else None

    def decided(self, uids: Collection[str]) -> None:
        """The groups of these prompts are decided: nobody takes up their sessions any more."""
        for session_id in [name for name, uid in self.handed_over.items() if uid in uids and name not in self.taken]:
            del self.handed_over[session_id]

    @property
    def uids(self) -> frozenset[str]:
        """Prompts with a session that may be taken up."""
        return frozenset(uid for uid, _ in self.candidates)

    async def take(self, uid: str, sample: str, submitted: int) -> StoredSession | None:
        """The session at this place of the group, for a prompt submitted in this step; None if there is none."""
        session = self.candidates.get((uid, sample))
        if session is None:
            return None
        assert session.oldest is not None
        if session.oldest < submitted - 1:
            del self.candidates[uid, sample]
            await self._begin_again(session, BegunAgain.OLDER_WEIGHTS)
            return None
        self.taken[session.session_id] = session  # before the read, so that nothing ends it meanwhile
        stored = await asyncio.to_thread(self.journal.read, session.session_id)
        if stored is None or not self._routes or _has_routes(stored):
            return stored
        self.taken.pop(session.session_id, None)
        if self.candidates.get((uid, sample)) is not session:  # its group was decided during the read
            return None
        del self.candidates[uid, sample]
        await self._begin_again(session, BegunAgain.NO_ROUTES)
        return None

    def waits(self, session_id: str) -> bool:
        """Whether it is of an earlier start, and may be taken up, and was not."""
        known = session_id in self.taken or session_id in self.offered
        return not known and any(session_id == one.session_id for one in self.candidates.values())

    async def end_unwanted(self, uids: Collection[str]) -> None:
        """Ends the hand-overs of sessions that nobody took up, of groups that were decided: their rows may be in the
        checkpoint.

        A data plane that was restarted does not know which were taken up, and which are of this start: it ends none.
        """
        if not self.begun:
            return
        for place, session in list(self.candidates.items()):
            if place[0] not in uids or session.stage is Stage.HANDED or session.session_id in self.taken:
                continue
            if self.candidates.pop(place, None) is not session:  # one of its kind was taken, or ended, meanwhile
                continue
            await self._end(session.session_id, session.stage, None)
            self.count(BegunAgain.UNWANTED, session.tokens)

    def count(self, why: BegunAgain, tokens: int) -> None:
        self.begun_again[why] += 1
        self.lost_tokens[why] += tokens

    def acknowledged(self, session_id: str, kept: bool) -> None:
        """One that was dropped is not taken up any more, and none is needed any more."""
        self.handed_over.pop(session_id, None)
        self.offered.pop(session_id, None)
        if not kept:
            for place in [place for place, one in self.candidates.items() if one.session_id == session_id]:
                del self.candidates[place]

    async def drop(self, session_id: str, reason: str) -> None:
        """A session that was taken up, and had been handed over before, is not trained after all."""
        if any(session.session_id == session_id for session in self.candidates.values()):
            await self.journal.append(undone(session_id, reason))

    async def _begin_again(self, session: SessionSummary, why: BegunAgain) -> None:
        if run_of(session) != self.run or session.validation:
            await self._end(session.session_id, session.stage, None)
            return
        if why in (BegunAgain.RUNNING, BegunAgain.NEWER_WEIGHTS):
            self._lose(session.session_id, session.uid, session.settings, self.version)
        self.handed_over.pop(session.session_id, None)
        reason = f"its run was stopped, and began it again ({why})"
        if session.stage is Stage.HANDED:
            await self.journal.append(undone(session.session_id, reason))
        else:
            await self._end(session.session_id, session.stage, reason)
        self.count(why, session.tokens)

    def summary(self) -> str:
        kept = f"{len(self.candidates)} sessions that had ended may be taken up"
        lost = [f"{count} ({why}, {self.lost_tokens[why]} tokens)" for why, count in self.begun_again.items()]
        return f"{kept}; begun again: {', '.join(lost) or 'none'}"

    def metrics(self) -> dict[str, float]:
        """Sessions and tokens that this start took up, and that it did not; empty for a run that was not resumed."""
        if self.version <= 0:
            return {}
        taken = {"resumed/sessions": len(self.taken), "resumed/tokens": sum(one.tokens for one in self.taken.values())}
        sessions = {f"resumed/begun_again/{why}": self.begun_again[why] for why in BegunAgain}
        lost = {"resumed/begun_again_tokens": self.lost_tokens.total()}
        return {name: float(value) for name, value in (taken | sessions | lost).items()}


def run_of(session: SessionSummary | StoredSession) -> str | None:
    """The run that opened it; None for one that was opened over HTTP, or by an earlier release."""
    run = session.settings.get("metadata", {}).get(RUN)
    return None if run is None else str(run)


def place_of(session: SessionSummary | StoredSession) -> Place:
    return session.uid, str(session.settings.get("metadata", {}).get(SAMPLE))


def undone(session_id: str, reason: str) -> OutsideEvent:
    """The session was handed over, but nothing that has its tokens is left."""
    return OutsideEvent(UNDONE, session_id, {"reason": reason}, time.time())


def _has_routes(stored: StoredSession) -> bool:
    return all(segment.routes is not None for call in stored.calls for segment in call.segments)
