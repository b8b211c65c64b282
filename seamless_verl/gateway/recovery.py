"""Restores a gateway's open sessions from the journal after its death.

A retry reads again what its calls produced, or continues the interrupted ones under their own ids. A session's deadline
does not stop while no gateway runs.

Not restored: that a reply was read in full (so a marked retry may get what ended before the restart), the likeliest
alternatives at a position, and requests that had no token yet, which count as no turn. Of stored responses: ids of tool
calls in the latest output, usage, and that one was deleted. How long calls waited is the data plane's to store.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from openai.types.responses import (
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseReasoningItem,
)
from openai.types.responses.response_reasoning_item import Content

from seamless_verl.gateway.calls import ENGINE_FINISH, REPLY, RESPONSE, gateway_fields
from seamless_verl.gateway.recorder import JournalRecorder
from seamless_verl.gateway.retries import MAX_ATTEMPTS, Attempt, CallOutput
from seamless_verl.gateway.session import Session, SessionLimits, SessionSampling
from seamless_verl.gateway.sessions import SessionTable
from seamless_verl.gateway.stored_responses import ItemIds, StoredResponse
from seamless_verl.journal import SqliteJournal, StoredCall, StoredSession
from seamless_verl.runtime.fields import read
from seamless_verl.trajectory.messages import ASSISTANT, parse_message
from seamless_verl.trajectory.records import Finish

MAX_RESTORED = 64  # stored responses of a session; the next one that is stored drops those beyond its own bound


async def restore_sessions(journal: SqliteJournal, recorder: JournalRecorder, table: SessionTable) -> int:
    """Restores a journal's open sessions, also into its recorder; returns their number. Raises JournalError."""
    stored = await asyncio.to_thread(journal.restore)
    for session in stored:
        table.restore(rebuild_session(session))
        recorder.restore_session(session)
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
        turns=len({gateway_fields(call)["attempt"] for call in calls}),
        tokens=sum(len(segment) for call in calls for segment in call.segments),
        rewards=dict(stored.rewards),
        images=dict(stored.images),
    )
    for call in calls:
        if call.finish not in ENGINE_FINISH or "message" not in call.reply:
            continue
        session.prefixes.add_recorded(call.request, call.reply, call.prompt_ids, call.turn().generated_ids)
        if (own := gateway_fields(call).get(RESPONSE)) is not None:
            messages, message = call.request["messages"], call.reply["message"]
            response = restore_response(own, messages, message, call.finish, stored.opened_at)
            session.responses.put(own["id"], response, MAX_RESTORED)
    for attempt in repeatable_attempts(calls):
        session.attempts.add(attempt)
    return session


def is_awaited(stored: StoredSession) -> bool:
    """Whether an agent loop waits for the session's end."""
    return bool(stored.settings["awaited"])


def repeatable_attempts(calls: Sequence[StoredCall]) -> Iterable[Attempt]:
    """The requests that can be retried, in the order in which they began: of those that ended, the latest."""
    groups: defaultdict[int, list[StoredCall]] = defaultdict(list)
    for call in calls:
        groups[gateway_fields(call)["attempt"]].append(call)
    repeatable = {n: g for n, g in groups.items() if all(one.interrupted or one.finish in ENGINE_FINISH for one in g)}
    attempts = [_attempt(number, group) for number, group in repeatable.items()]
    ended = [attempt for attempt in attempts if not attempt.running]
    old = ended[: len(ended) - MAX_ATTEMPTS] if len(ended) > MAX_ATTEMPTS else []
    return [attempt for attempt in attempts if attempt not in old]


def _attempt(number: int, group: Sequence[StoredCall]) -> Attempt:
    own = gateway_fields(group[0])
    attempt = Attempt(group[0].digest, own.get("key"), number, own[REPLY])
    for call in group:
        index = gateway_fields(call)["place"]
        if call.finish is None:
            attempt.interrupted_calls[index] = call
        else:
            stop_reason = call.reply.get("stop_reason")
            attempt.outputs[index] = CallOutput.from_record(call.segments, ENGINE_FINISH[call.finish], stop_reason)
    return attempt


def _request_number(call_id: str) -> int:
    """The number in a call's id, which is `<session>.<number>` or `<session>.<number>-<index>`."""
    return int(call_id.rpartition(".")[2].partition("-")[0])


def restore_response(
    response: Mapping[str, Any],
    messages: Sequence[Mapping[str, Any]],
    reply: Mapping[str, Any],
    finish: Finish,
    created_at: float,
) -> StoredResponse:
    """The stored response of one call, with the ids that its items had; `response` is as in `SessionCall`."""
    asked = messages[1:] if response["instructions"] else messages
    output, ids = list(_items([reply])), ItemIds(response["id"])
    for item in output:
        ids.assign(item)
    items = [*(item for message in asked for item in _items([message])), *output]
    status = "incomplete" if finish is Finish.LENGTH else "completed"
    shown = [item.model_dump(mode="json", by_alias=True) for item in output]
    made = {"id": response["id"], "object": "response", "created_at": int(created_at), "status": status}
    unset = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
    body = {**made, "model": response["model"], "output": shown, **unset}
    return StoredResponse(body, items)


def _items(messages: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    """Chat messages as input items of the Responses API, in the forms that vLLM converts back; they have no ids yet."""
    for message in messages:
        if message["role"] == ASSISTANT:
            yield from _assistant_items(message)
        elif message["role"] == "tool":
            output = {"call_id": message.get("tool_call_id", ""), "output": message.get("content")}
            yield {"type": "function_call_output", **output}
        else:
            yield {"role": message["role"], "content": message.get("content") or ""}


def _assistant_items(message: Mapping[str, Any]) -> Iterator[Any]:
    if reasoning := message.get("reasoning"):
        thoughts = [Content(type="reasoning_text", text=reasoning)]
        yield ResponseReasoningItem(type="reasoning", id="", summary=[], content=thoughts)
    if text := parse_message(message).text:
        parts = [ResponseOutputText(type="output_text", text=text, annotations=[])]
        yield ResponseOutputMessage(type="message", id="", role=ASSISTANT, status="completed", content=parts)
    for number, call in enumerate(message.get("tool_calls") or ()):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        known = {"call_id": call.get("id") or f"call_{number}", "name": name, "arguments": arguments}
        yield ResponseFunctionToolCall(type="function_call", status="completed", **known)
