"""Changes of an agent's chat messages before they are matched with the record and rendered.

Agents write one conversation in several ways that mean the same. Here it gets one form, so that a session has one
prompt for it. The record has the messages in this form.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from seamless_verl.trajectory.messages import ASSISTANT

TOOL, SYSTEM, DEVELOPER = "tool", "system", "developer"
RENDERED_TEXTS = ("refusal", "thinking")
"""Types of parts whose text is under the type's name, and is rendered as any text."""


def with_listed_contents(messages: Sequence[Any]) -> list[Any]:
    """The messages, with each content that is no text as a list.

    Of an empty list pydantic makes an iterator, which is read once and is no JSON.
    """
    return [_with_listed_content(message) for message in messages]


def _with_listed_content(message: Any) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if isinstance(content, str | list | Mapping) or not isinstance(content, Iterable):
        return message
    return {**message, "content": list(content)}


def has_parts(messages: Sequence[Any]) -> bool:
    return any(isinstance(message, Mapping) and isinstance(message.get("content"), list) for message in messages)


def with_joined_texts(messages: Sequence[Any]) -> list[Any]:
    """The messages, with contents of texts alone as the one text that vLLM makes of them for a template of such.

    An agent may send the parts in one call and their text in the next. A reply is left as it is: the APIs give its
    parts no separator.
    """
    return [_with_joined_text(message) for message in messages]


def _with_joined_text(message: Any) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list) or message.get("role") == ASSISTANT:
        return message
    texts = [_text_of(part) for part in content]
    known = [text for text in texts if text is not None]
    return {**message, "content": "\n".join(filter(None, known))} if len(known) == len(texts) else message


def _text_of(part: Any) -> str | None:
    """None for what is no plain text."""
    if isinstance(part, Mapping):
        part = part.get("text") if part.get("type") == "text" else None
    return part if isinstance(part, str) else None


def has_developer(messages: Sequence[Any]) -> bool:
    return any(_role(message) == DEVELOPER for message in messages)


def developer_to_system(messages: Sequence[Any]) -> list[Any]:
    """The messages, with those of developers as system messages in their places; they bring no tools."""
    return [_as_system(message) if _role(message) == DEVELOPER else message for message in messages]


def _as_system(message: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name != "tools"} | {"role": SYSTEM}


def parts_as_text(messages: Sequence[Any]) -> list[Any]:
    """The messages, with the refusals and thoughts among their parts as texts, which is how vLLM renders them.

    Recorded ids are reused in conversations of texts. A `tool_reference` is none: what is rendered for it, if anything,
    is the chat template's own, and its name is no text that tells one message from another.
    """
    return [_with_texts(message) if any(map(_is_rendered_text, _parts(message))) else message for message in messages]


def _with_texts(message: Mapping[str, Any]) -> dict[str, Any]:
    parts = [_as_text(part) if _is_rendered_text(part) else part for part in _parts(message)]
    return {**message, "content": parts}


def _as_text(part: Mapping[str, Any]) -> dict[str, Any]:
    kind = part["type"]
    return {name: value for name, value in part.items() if name != kind} | {"type": "text", "text": part[kind]}


def _parts(message: Any) -> Sequence[Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    return content if isinstance(content, list) else ()


def _is_rendered_text(part: Any) -> bool:
    kind = part.get("type") if isinstance(part, Mapping) else None
    return kind in RENDERED_TEXTS and isinstance(part.get(kind), str)


def order_tool_results(messages: Sequence[Any]) -> list[Any]:
    """The messages, with the results of an assistant's tool calls in the order of the calls.

    The APIs match results by the ids of calls, so agents send them in any order, such as that in which they were done.
    Many chat templates show no ids: there the first result is read as the first call's. Results of unknown ids come
    last, in their order. Results stay as they are where an id is in several of the calls, or in several results.
    """
    ordered: list[Any] = []
    call_ids: list[str] = []
    for role, group in groupby(messages, _role):
        run = list(group)
        ordered += _in_order(run, call_ids) if role == TOOL else run
        call_ids = [call_id for message in run for call_id in _call_ids(message)] if role == ASSISTANT else []
    return ordered


def _in_order(results: list[Any], call_ids: Sequence[str]) -> list[Any]:
    places = {call_id: place for place, call_id in enumerate(call_ids)}
    found = [_place(result, places) for result in results]
    known = [place for place in found if place < len(places)]
    if len(places) < len(call_ids) or len(set(known)) < len(known):
        return results
    return sorted(results, key=lambda result: _place(result, places))


def _place(result: Mapping[str, Any], places: Mapping[str, int]) -> int:
    """The place of the result's call; behind all calls for one of an unknown id."""
    call_id = result.get("tool_call_id")
    return places.get(call_id, len(places)) if isinstance(call_id, str) else len(places)


def _call_ids(message: Mapping[str, Any]) -> Iterator[str]:
    """The ids of a message's calls; what is no call is for vLLM to refuse."""
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list | tuple) else ():
        if isinstance(call, Mapping) and isinstance(call_id := call.get("id"), str):
            yield call_id


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else None
