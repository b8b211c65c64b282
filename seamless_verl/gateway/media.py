"""Images, audio, video and documents in a request become placeholders: a call carries token ids alone.

They are replaced in the body, before vLLM's serving classes see it: these refuse some of them, and put the images of an
Anthropic tool result into a message of its own, behind an empty result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KINDS = ("image", "audio", "video", "file", "document")
PLACEHOLDER = "[{kind} left out: this model is given text only]"
FIELDS = {"messages": "text", "input": "input_text"}
"""Fields of a body that hold messages, and the type that a part of text has there."""


def replace_media(body: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The fields of the body that change, as new lists, and the kinds of what was replaced, in their order."""
    changed, kinds = dict[str, Any](), list[str]()
    for field, text in FIELDS.items():
        before, entries = len(kinds), body.get(field)
        replaced = [_entry(entry, text, kinds) for entry in entries] if isinstance(entries, list) else []
        if len(kinds) > before:
            changed[field] = replaced
    return changed, kinds


def media_kind(part: object) -> str | None:
    """What a part of a message holds that is no text: one of KINDS; None for a text, and for what is no part."""
    if not isinstance(part, Mapping):
        return None
    names = [part["type"]] if isinstance(part.get("type"), str) else list(part)
    return next((kind for kind in KINDS for name in names if kind in str(name).split("_")), None)


def _entry(entry: Any, text: str, kinds: list[str]) -> Any:
    """A message or, in the Responses API, the output of a call."""
    if not isinstance(entry, Mapping):
        return entry
    lists = {name: parts for name in ("content", "output") if isinstance(parts := entry.get(name), list)}
    return {**entry, **{name: [_part(part, text, kinds) for part in parts] for name, parts in lists.items()}}


def _part(part: Any, text: str, kinds: list[str]) -> Any:
    """A part of a message; in Anthropic's API the result of a call is one, with parts of its own."""
    inner = part.get("content") if isinstance(part, Mapping) else None
    if isinstance(inner, list):
        return {**part, "content": [_leaf(one, text, kinds) for one in inner]}
    return _leaf(part, text, kinds)


def _leaf(part: Any, text: str, kinds: list[str]) -> Any:
    kind = media_kind(part)
    if kind is None:
        return part
    kinds.append(kind)
    return {"type": text, "text": _text_of(part) or PLACEHOLDER.format(kind=kind)}


def _text_of(part: Mapping[str, Any]) -> str | None:
    """The text of an Anthropic document that is one."""
    source = part.get("source")
    found = source.get("data") if isinstance(source, Mapping) and source.get("type") == "text" else None
    return found if isinstance(found, str) else None
