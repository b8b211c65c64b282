"""A gateway's sessions after its death, from the journal it left.

What comes back: every open session with its key, its limits and what it used of them, its conversations' tokens,
its turns, and its requests for the SDKs that repeat them. A repeated request reads again what its calls gave, or
goes on with the ones that were cut, under their own ids. A deadline runs on while no gateway does.

What does not come back: that a reply had been read in full (so a marked retry may be given what ended before the
restart), the likeliest other tokens at a position, and requests that had no token yet; those count as no turn.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

from seamless_verl.gateway.recorder import JournalRecorder
from seamless_verl.gateway.resumed_calls import OWN, produced
from seamless_verl.gateway.retries import KEPT, Attempt, CallOutput
from seamless_verl.gateway.session import Session, SessionLimits, SessionSampling
from seamless_verl.gateway.sessions import SessionTable
from seamless_verl.journal import StoredCall, StoredSession
from seamless_verl.trajectory.records import Finish, tokens

# As an engine says it: that the model called tools is read off the text, again.
ENDS = {Finish.STOP: Finish.STOP, Finish.TOOL_CALLS: Finish.STOP, Finish.LENGTH: Finish.LENGTH}


class RestorableJournal(Protocol):
    """All that restoring asks of a journal."""

    def restore(self) -> tuple[StoredSession, ...]: ...


@dataclass(frozen=True)
class GatewayRecovery:
    """Brings a journal's open sessions into a gateway, and the recorder that writes to that same journal."""

    journal: RestorableJournal
    recorder: JournalRecorder

    async def into(self, table: SessionTable) -> int:
        """How many sessions came back; raises JournalError when the journal cannot be read."""
        left = await asyncio.to_thread(self.journal.restore)
        for one in left:
            table.restore(session_of(one))
            self.recorder.restore(one)
        return len(left)


def session_of(left: StoredSession) -> Session:
    """The session as the gateway knew it."""
    settings, calls = left.settings, left.calls
    session = Session(
        left.session_id,
        left.uid,
        bytes.fromhex(settings["key"]),
        limits=SessionLimits(**settings["limits"]),
        sampling=SessionSampling(**settings["sampling"]),
        metadata=settings["metadata"],
        opened_at=left.opened_at,
        requests=max((_number(call.call_id) for call in calls), default=0),
        turns=len({_own(call)["attempt"] for call in calls}),
        tokens=sum(map(produced, calls)),
    )
    for call in calls:
        if call.finish in ENDS and "message" in call.reply:
            generated = tokens(chain.from_iterable(segment.ids for segment in call.segments))
            session.memory.recall(call.request, call.reply, call.prompt_ids, generated)
    for attempt in attempts_of(calls):
        session.attempts.restore(attempt)
    return session


def attempts_of(calls: Sequence[StoredCall]) -> Iterable[Attempt]:
    """The requests that can be repeated, by their beginning: of those that ended, the latest."""
    groups: defaultdict[int, list[StoredCall]] = defaultdict(list)
    for call in calls:
        groups[_own(call)["attempt"]].append(call)
    known = [_attempt(number, group) for number, group in groups.items() if _repeatable(group)]
    ended = [attempt for attempt in known if not attempt.running]
    old = ended[: len(ended) - KEPT] if len(ended) > KEPT else []
    return [attempt for attempt in known if attempt not in old]


def _repeatable(group: Iterable[StoredCall]) -> bool:
    return all(call.cut or call.finish in ENDS for call in group)


def _attempt(number: int, group: Sequence[StoredCall]) -> Attempt:
    attempt = Attempt(group[0].digest, _own(group[0]).get("key"), number)
    for call in group:
        place = _own(call)["place"]
        if call.finish is None:
            attempt.cuts[place] = call
        else:
            stop = call.reply.get("stop_reason")
            attempt.tapes[place] = CallOutput.recorded(call.segments, ENDS[call.finish], stop)
    return attempt


def _own(call: StoredCall) -> dict[str, Any]:
    own: dict[str, Any] = call.request[OWN]
    return own


def _number(call_id: str) -> int:
    """Of the request it came with: `<session>.<number>`, or `<session>.<number>-<place>`."""
    return int(call_id.rpartition(".")[2].partition("-")[0])
