"""Forms of a request that the real services take and vLLM does not, and what it is given in their place.

They mean the same: fields that are empty, messages without a type or with several texts, a choice among several tools,
and fields that only calls of hosted tools have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from seamless_verl.trajectory.messages import ASSISTANT

NEVER_LEFT_OUT = frozenset({"model", "messages", "prompt", "input"})
"""Fields of which an empty one is asked as it is, or refused: they are what is asked, and of which model."""
LISTS = ("messages", "input")
MESSAGE, REFUSAL = "message", "refusal"
ALLOWED_TOOLS = "allowed_tools"
MODES = ("auto", "required")
HOSTED_CALLS = ("_call", "_call_output")
"""How items end that a service's own tools make: `web_search_call.results` asks for a field of one."""


def without_empty(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body without its empty fields, and its messages and items without those that are null.

    Clients write what they leave out as null, "", [] or {}. Each API of vLLM takes some of them and refuses others.
    """
    given = {name: value for name, value in body.items() if name in NEVER_LEFT_OUT or not is_empty(value)}
    lists = {name: value for name in LISTS if isinstance(value := given.get(name), list)}
    return given | {name: [_without_nulls(item) for item in value] for name, value in lists.items()}


def _without_nulls(item: object) -> object:
    if not isinstance(item, dict) or None not in item.values():
        return item
    return {name: value for name, value in item.items() if value is not None or name == "content"}


def is_empty(value: object) -> bool:
    return value is None or (isinstance(value, str | list | dict) and not value)


def is_unread_message(item: object) -> bool:
    """Whether an item of the Responses API's input is a message in a form that vLLM refuses, or reads in part.

    The Vercel AI SDK sends assistants' messages without a type: vLLM finds no such item, or takes one with an id for a
    reference to an item. Of an assistant's message vLLM reads the first text alone, and no refusal.
    """
    content = item.get("content") if isinstance(item, Mapping) else None
    if not isinstance(item, Mapping) or not isinstance(content, list) or not isinstance(item.get("role"), str):
        return False
    if item.get("type") is None:
        return True
    if item["type"] != MESSAGE or item["role"] != ASSISTANT:
        return False
    return len(content) != 1 or _kind(content[0]) == REFUSAL


def readable_items(items: Sequence[Any]) -> list[Any]:
    """The items, with those of `is_unread_message` as vLLM reads them."""
    return [_readable(item) if is_unread_message(item) else item for item in items]


def _readable(item: Mapping[str, Any]) -> dict[str, Any]:
    typed = {**item, "type": MESSAGE}
    texts = [text_of(part) for part in item["content"]]
    if item["role"] != ASSISTANT or None in texts:  # what is no text is for vLLM to refuse
        return typed
    text = "".join(text for text in texts if text is not None)
    return {**typed, "content": [{"type": "output_text", "text": text, "annotations": []}]}


def text_of(part: object) -> str | None:
    """The text of a part of an assistant's message, also that of a refusal; None for what is none."""
    if not isinstance(part, Mapping):
        return None
    text = part.get(REFUSAL if _kind(part) == REFUSAL else "text")
    return text if isinstance(text, str) else None


def _kind(part: object) -> object:
    return part.get("type") if isinstance(part, Mapping) else None


def allowed_tools_mode(choice: object) -> str | None:
    """The choice, `auto` or `required`, among some of the tools; None for any other choice.

    The prompt shows all tools, as with the real service, where the choice exists to leave the prompt as it is.
    """
    mode = allowed.get("mode") if (allowed := _allowed(choice)) is not None else None
    return mode if mode in MODES else None


def needs_tools(choice: object) -> bool:
    """Whether a choice of tools asks for a call; `auto` and `none` mean nothing without tools."""
    return (choice.get("type") if isinstance(choice, Mapping) else choice) not in (None, "auto", "none")


def allowed_names(choice: object) -> set[str] | None:
    """The names of the functions that a choice allows; None for another choice."""
    if (allowed := _allowed(choice)) is None:
        return None
    tools = allowed.get("tools")
    functions = [_function(tool) for tool in (tools if isinstance(tools, list) else ())]
    return {name for function in functions if isinstance(name := function.get("name"), str)}


def _allowed(choice: object) -> Mapping[str, Any] | None:
    """What a choice of `allowed_tools` says: in chats within a field of this name, in responses beside its type."""
    if not isinstance(choice, Mapping) or choice.get("type") != ALLOWED_TOOLS:
        return None
    inner = choice.get(ALLOWED_TOOLS, choice)
    return inner if isinstance(inner, Mapping) else None


def _function(tool: object) -> Mapping[str, Any]:
    found = tool.get("function", tool) if isinstance(tool, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def without_hosted(included: Sequence[Any]) -> list[Any]:
    """What a request wants included in its response, without what only hosted tools have."""
    return [name for name in included if not (isinstance(name, str) and name.partition(".")[0].endswith(HOSTED_CALLS))]
