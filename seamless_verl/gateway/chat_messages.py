"""Gives an agent's chat messages one form before they are matched with the record and rendered.

Agents write one conversation in several ways that mean the same. What is no message is left for vLLM to refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from itertools import groupby
from typing import Any

from seamless_verl.trajectory.messages import ASSISTANT

TOOL, SYSTEM, DEVELOPER = "tool", "system", "developer"
RENDERED_TEXTS = ("refusal", "thinking")  # types of parts with a text under the type's name, rendered as any text


def _each(change: Callable[[Mapping[str, Any]], Any]) -> Callable[[Sequence[Any]], list[Any]]:
    """The change of all messages; what is no message stays as it is."""
    return wraps(change)(lambda messages: [change(one) if isinstance(one, Mapping) else one for one in messages])


@_each
def with_listed_contents(message: Mapping[str, Any]) -> Any:
    """Makes a list of a content that is no text: pydantic makes an iterator of an empty one."""
    content = message.get("content")
    given = isinstance(content, str | list | Mapping) or not isinstance(content, Iterable)
    return message if given else {**message, "content": list(content)}


def has_parts(messages: Sequence[Any]) -> bool:
    return any(isinstance(_field(message, "content"), list) for message in messages)


@_each
def with_joined_texts(message: Mapping[str, Any]) -> Any:
    """Makes one text of a content of texts alone, as vLLM does for a template of such.

    A reply is left as it is: the APIs give its parts no separator.
    """
    content = message.get("content")
    if not isinstance(content, list) or message.get("role") == ASSISTANT:
        return message
    texts = [_text_of(part) for part in content]
    known = [text for text in texts if text is not None]
    return {**message, "content": "\n".join(filter(None, known))} if len(known) == len(texts) else message


def has_developer(messages: Sequence[Any]) -> bool:
    return any(_field(message, "role") == DEVELOPER for message in messages)


@_each
def developer_to_system(message: Mapping[str, Any]) -> Any:
    """Makes a system message of a developer's, which brings no tools."""
    if message.get("role") != DEVELOPER:
        return message
    return {name: value for name, value in message.items() if name != "tools"} | {"role": SYSTEM}


@_each
def parts_as_text(message: Mapping[str, Any]) -> Any:
    """Makes texts of the refusals and thoughts among a message's parts, which is how vLLM renders them.

    A `tool_reference` is none: what is rendered for it is the chat template's own.
    """
    parts = message.get("content")
    if not isinstance(parts, list) or not any(map(_is_rendered_text, parts)):
        return message
    return {**message, "content": [_as_text(part) if _is_rendered_text(part) else part for part in parts]}


def order_tool_results(messages: Sequence[Any]) -> list[Any]:
    """The messages, with the results of an assistant's tool calls in the order of the calls.

    Agents send them in any order, matched by ids, which many templates do not show: there the first result is read as
    the first call's. Results of unknown ids come last; all stay as they are where an id is in several calls or results.
    """
    ordered: list[Any] = []
    call_ids: list[str] = []
    for role, group in groupby(messages, lambda message: _field(message, "role")):
        run = list(group)
        ordered += _in_order(run, call_ids) if role == TOOL else run
        call_ids = [call_id for message in run for call_id in _call_ids(message)] if role == ASSISTANT else []
    return ordered


def _in_order(results: list[Any], call_ids: Sequence[str]) -> list[Any]:
    places = {call_id: place for place, call_id in enumerate(call_ids)}

    def place_of(result: Any) -> int:
        call_id = result.get("tool_call_id")
        return places.get(call_id, len(places)) if isinstance(call_id, str) else len(places)

    known = [place for place in map(place_of, results) if place < len(places)]
    unique = len(places) == len(call_ids) and len(set(known)) == len(known)
    return sorted(results, key=place_of) if unique else results


def _call_ids(message: Mapping[str, Any]) -> Iterator[str]:
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list | tuple) else ():
        if isinstance(call_id := _field(call, "id"), str):
            yield call_id


def _text_of(part: Any) -> str | None:
    """None for what is no plain text."""
    if isinstance(part, Mapping):
        part = part.get("text") if part.get("type") == "text" else None
    return part if isinstance(part, str) else None


def _is_rendered_text(part: Any) -> bool:
    kind = _field(part, "type")
    return kind in RENDERED_TEXTS and isinstance(part.get(kind), str)


def _as_text(part: Mapping[str, Any]) -> dict[str, Any]:
    kind = part["type"]
    return {name: value for name, value in part.items() if name != kind} | {"type": "text", "text": part[kind]}


def _field(message: Any, name: str) -> Any:
    return message.get(name) if isinstance(message, Mapping) else None
