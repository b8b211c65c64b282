"""Restores a gateway's open sessions from the journal after its death.

Restored: every open session with its key, its limits and how much of them is used, the token ids of its
conversations, its stored responses, its turns, and its requests for SDKs that retry them. A retry reads again what its
calls produced, or continues the interrupted ones under their own ids. A session's deadline does not stop while no
gateway runs. The seconds in which its calls waited before are stored by the data plane, not in the journal.

Not restored: that a reply was read in full (so a marked retry may get what ended before the restart), the likeliest
alternatives at a position, and requests that had no token yet; those count as no turn.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

from seamless_verl.gateway.recorder import JournalRecorder
from seamless_verl.gateway.restored_responses import KEY, restore_response
from seamless_verl.gateway.resumed_calls import ENGINE_FINISH, GATEWAY_KEY, count_recorded
from seamless_verl.gateway.retries import MAX_ATTEMPTS, Attempt, CallOutput
from seamless_verl.gateway.session import Session, SessionLimits, SessionSampling
from seamless_verl.gateway.sessions import SessionTable
from seamless_verl.journal import StoredCall, StoredSession
from seamless_verl.runtime.fields import read
from seamless_verl.trajectory.records import tokens

MAX_RESTORED = 64  # stored responses of a session; the next one that is stored drops those beyond its own bound


class SessionStore(Protocol):
    """The part of a journal that recovery reads."""

    def restore(self) -> tuple[StoredSession, ...]: ...


@dataclass(frozen=True)
class GatewayRecovery:
    """Restores a journal's open sessions into a gateway, and into the recorder that writes that same journal."""

    journal: SessionStore
    recorder: JournalRecorder

    async def restore_into(self, table: SessionTable) -> int:
        """How many sessions were restored; raises JournalError when the journal cannot be read."""
        stored = await asyncio.to_thread(self.journal.restore)
        for session in stored:
            table.restore(rebuild_session(session))
            self.recorder.restore_session(session)
        return len(stored)


def rebuild_session(stored: StoredSession) -> Session:
    """The session as the gateway that died had it."""
    settings, calls = stored.settings, stored.calls
    session = Session(
        stored.session_id,
        stored.uid,
        bytes.fromhex(settings["key"]),
        limits=read(SessionLimits, settings["limits"], key="limits"),
        sampling=read(SessionSampling, settings["sampling"], key="sampling"),
        metadata=settings["metadata"],
        awaited=is_awaited(stored),
        opened_at=stored.opened_at,
        requests=max((_request_number(call.call_id) for call in calls), default=0),
        turns=len({_gateway_fields(call)["attempt"] for call in calls}),
        tokens=sum(map(count_recorded, calls)),
        rewards=dict(stored.rewards),
    )
    for call in calls:
        if call.finish in ENGINE_FINISH and "message" in call.reply:
            generated = tokens(chain.from_iterable(segment.ids for segment in call.segments))
            session.prefixes.add_recorded(call.request, call.reply, call.prompt_ids, generated)
        own = _gateway_fields(call)
        if call.finish in ENGINE_FINISH and KEY in own and "message" in call.reply:
            messages, message = call.request["messages"], call.reply["message"]
            response = restore_response(own[KEY], messages, message, call.finish, stored.opened_at)
            session.responses.put(own[KEY]["id"], response, MAX_RESTORED)
    for attempt in repeatable_attempts(calls):
        session.attempts.add(attempt)
    return session


def is_awaited(stored: StoredSession) -> bool:
    """Whether an agent loop waits for the session's end; journals of earlier releases do not say that none does."""
    return bool(stored.settings.get("awaited", True))


def repeatable_attempts(calls: Sequence[StoredCall]) -> Iterable[Attempt]:
    """The requests that can be retried, in the order in which they began: of those that ended, the latest."""
    groups: defaultdict[int, list[StoredCall]] = defaultdict(list)
    for call in calls:
        groups[_gateway_fields(call)["attempt"]].append(call)
    attempts = [_attempt(number, group) for number, group in groups.items() if _is_repeatable(group)]
    ended = [attempt for attempt in attempts if not attempt.running]
    old = ended[: len(ended) - MAX_ATTEMPTS] if len(ended) > MAX_ATTEMPTS else []
    return [attempt for attempt in attempts if attempt not in old]


def _is_repeatable(group: Iterable[StoredCall]) -> bool:
    return all(call.interrupted or call.finish in ENGINE_FINISH for call in group)


def _attempt(number: int, group: Sequence[StoredCall]) -> Attempt:
    attempt = Attempt(group[0].digest, _gateway_fields(group[0]).get("key"), number)
    for call in group:
        index = _gateway_fields(call)["place"]
        if call.finish is None:
            attempt.interrupted_calls[index] = call
        else:
            stop_reason = call.reply.get("stop_reason")
            attempt.outputs[index] = CallOutput.from_record(call.segments, ENGINE_FINISH[call.finish], stop_reason)
    return attempt


def _gateway_fields(call: StoredCall) -> dict[str, Any]:
    own: dict[str, Any] = call.request[GATEWAY_KEY]
    return own


def _request_number(call_id: str) -> int:
    """The number in a call's id, which is `<session>.<number>` or `<session>.<number>-<index>`."""
    return int(call_id.rpartition(".")[2].partition("-")[0])
