"""Images, audio, video and documents in a request become placeholders: a call carries token ids alone.

They are replaced in the body, before vLLM's serving classes see it: these refuse some of them, and put the images of an
Anthropic tool result into a message of its own, behind an empty result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

KINDS = ("image", "audio", "video", "file", "document")
PLACEHOLDER = "[{kind} left out: this model is given text only]"
FIELDS = {"messages": "text", "input": "input_text"}
"""Fields of a body that hold messages, and the type that a part of text has there."""


def media_in(body: Mapping[str, Any]) -> list[str]:
    """The kinds of all media in a body's messages, in their order."""
    return [kind for field in FIELDS for part in _parts_in(body.get(field)) if (kind := media_kind(part)) is not None]


def replace_media(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the body that hold messages, as new lists in which all media are placeholders."""
    return {
        field: [_entry(entry, text) for entry in entries]
        for field, text in FIELDS.items()
        if isinstance(entries := body.get(field), list)
    }


def media_kind(part: object) -> str | None:
    """What a part of a message holds that is no text: one of KINDS; None for a text, and for what is no part."""
    if not isinstance(part, Mapping):
        return None
    names = [part["type"]] if isinstance(part.get("type"), str) else list(part)
    return next((kind for kind in KINDS for name in names if kind in str(name).split("_")), None)


def _parts_in(entries: object) -> Iterator[Any]:
    """Of messages and, in the Responses API, of outputs of calls; also of a call's result in Anthropic's messages."""
    for entry in entries if isinstance(entries, list) else ():
        for parts in _lists(entry, "content", "output").values():
            for part in parts:
                yield from _lists(part, "content").get("content", [part])


def _lists(entry: object, *names: str) -> dict[str, list[Any]]:
    """Those of these fields that are lists."""
    found = entry if isinstance(entry, Mapping) else {}
    return {name: parts for name in names if isinstance(parts := found.get(name), list)}


def _entry(entry: Any, text: str) -> Any:
    lists = _lists(entry, "content", "output")
    changed = {name: [_part(part, text) for part in parts] for name, parts in lists.items()}
    return {**entry, **changed} if changed else entry


def _part(part: Any, text: str) -> Any:
    inner = _lists(part, "content").get("content")
    return _leaf(part, text) if inner is None else {**part, "content": [_leaf(one, text) for one in inner]}


def _leaf(part: Any, text: str) -> Any:
    kind = media_kind(part)
    return part if kind is None else {"type": text, "text": _text_of(part) or PLACEHOLDER.format(kind=kind)}


def _text_of(part: Mapping[str, Any]) -> str | None:
    """The text of an Anthropic document that is one."""
    source = part.get("source")
    found = source.get("data") if isinstance(source, Mapping) and source.get("type") == "text" else None
    return found if isinstance(found, str) else None
