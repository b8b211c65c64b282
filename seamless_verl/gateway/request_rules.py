"""What a request may ask for: bounds, hosted tools and output tokens, checked before vLLM's serving classes see it.

Agents send what the real services accept: tools that a service would run itself, more output tokens than a model
has room for, and forms that vLLM does not read (`request_forms.py`). The gateway takes such requests in, and changes
the body that vLLM gets; the recorded request is the agent's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from seamless_verl.gateway.api_errors import ApiError, ErrorCode
from seamless_verl.gateway.media import media_in, replace_media
from seamless_verl.gateway.request_forms import (
    allowed_names,
    allowed_tools_mode,
    is_unread_message,
    needs_tools,
    readable_items,
    without_hosted,
)
from seamless_verl.runtime.fields import Positive, check

HostedTools: TypeAlias = Literal["drop", "refuse"]
Media: TypeAlias = Literal["replace", "refuse"]
OUTPUT_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
"""Names under which the APIs bound the output tokens of a call."""
SCHEMA_FIELDS = ("tools", "response_format", "structured_outputs", "output_config", "text")
"""Fields with JSON schemas, which become grammars."""
SCHEMAS_IN_TEXTS = ("json", "structural_tag")
"""Fields of `structured_outputs` that may hold JSON in a text."""
CLIENT_TOOLS = frozenset({None, "function"})
"""Types of tools that the agent runs; Anthropic's API has none, or `custom`."""
CUSTOM, SCHEMA = "custom", "input_schema"
"""The type of Anthropic's tools, which have a schema, and of OpenAI's tools whose argument is a free text. No parser of
vLLM reads a call of the second kind, so that they are left out as hosted ones are."""
NAMESPACE = "namespace"
"""The type of a group of tools under one name; the agent runs those of them that are functions, as Codex does its
sub-agents."""
MAX_BODY = 32 << 20  # bytes of a request: near 8 million tokens of text
MAX_VALUES, MAX_TEXT = 20_000, 1 << 20
"""Values and characters in one field with schemas: the gateway compiles as many in about a second."""


@dataclass(frozen=True)
class RequestRules:
    """Bounds of one request; `strict_model` refuses model names that are not served.

    `max_choices` bounds the calls of a request: its choices, for each of its prompts. `max_nesting` bounds how deep
    objects and lists are nested in tools and schemas. `max_stored` is the number of responses that a session keeps.

    Raises:
        ConfigError: a bound is not a whole number above 0.
    """

    strict_model: bool = False
    hosted_tools: HostedTools = "drop"
    media: Media = "replace"
    max_choices: Positive = 128
    max_nesting: Positive = 64
    max_stored: Positive = 64

    def __post_init__(self) -> None:
        check(self, key="requests")


@dataclass(frozen=True)
class Changes:
    """What vLLM gets instead of a body: `overrides` replace fields, and fields in `removed` are left out.

    `dropped_tools` are the hosted tools that are left out, by their places in the list: their types. `replaced_media`
    are the kinds of the images and the like that become placeholders. `unread_items`: the input has messages in a form
    that vLLM does not read.
    """

    overrides: Mapping[str, Any] = field(default_factory=dict)
    removed: frozenset[str] = frozenset()
    dropped_tools: Mapping[int, str] = field(default_factory=dict)
    replaced_media: tuple[str, ...] = ()
    unread_items: bool = False

    def apply(self, body: dict[str, Any]) -> dict[str, Any]:
        """The changed body, a new dict."""
        changed = {**body, **self.overrides, **(replace_media(body) if self.replaced_media else {})}
        if self.dropped_tools:
            changed["tools"] = [tool for place, tool in enumerate(body["tools"]) if place not in self.dropped_tools]
        if self.unread_items:
            changed["input"] = readable_items(changed["input"])
        for name in self.removed:
            changed.pop(name, None)
        return changed


def count_calls(body: Mapping[str, Any], rules: RequestRules) -> int:
    """The request's calls: its choices, for each of its prompts. Values of a wrong type are for vLLM to refuse.

    Raises:
        ApiError: they are more than `max_choices`.
    """
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    prompts = len(prompt) if several and isinstance(prompt, list) else 1
    calls = _whole_number(body.get("n")) * prompts
    if calls > rules.max_choices:
        message = f"{_shown(calls)} choices in one request: at most {rules.max_choices} are served"
        raise ApiError(ErrorCode.OUT_OF_BOUNDS, message, param="prompt" if prompts > rules.max_choices else "n")
    return calls


def _whole_number(value: object) -> int:
    """The number that vLLM would read, which takes digits in a text for a number, too; at least 1."""
    if not isinstance(value, (int, float, str)):
        return 1
    try:
        return max(int(value), 1)
    except (ValueError, OverflowError):
        return 1


def _shown(number: int) -> str:
    return str(number) if number < 1_000_000_000 else "More than a billion"


def changes_for(
    body: Mapping[str, Any],
    rules: RequestRules,
    context: int,
    sampling: Mapping[str, Any] | None = None,
    *,
    namespaces: bool = False,
) -> Changes:
    """The changes of a request's body for a model with room for `context` tokens; `sampling` is the session's.

    `namespaces`: the API that is called, in this version of vLLM, takes namespaces of tools.

    Raises:
        ApiError: a schema is no object, or nested too deeply, or a hosted tool or an image is refused.
    """
    check_schemas(body, rules.max_nesting)
    media = tuple(media_in(body))
    if media and rules.media == "refuse":
        message = f"The model is given text only, and no {', '.join(dict.fromkeys(media))}. Leave it out"
        raise ApiError(ErrorCode.UNSUPPORTED, message, param="messages" if "messages" in body else "input")
    overrides: dict[str, Any] = dict(sampling or {})
    for name in OUTPUT_LIMITS:
        limit = body.get(name)
        if isinstance(limit, int) and limit > context:
            overrides[name] = context
    if (mode := allowed_tools_mode(body.get("tool_choice"))) is not None:
        overrides["tool_choice"] = mode
    items = body.get("input")
    unread = isinstance(items, list) and any(map(is_unread_message, items))
    tools = body.get("tools")
    given = tools if isinstance(tools, list) else []
    dropped = {place: tool["type"] for place, tool in enumerate(given) if _is_hosted(tool, namespaces)}
    if rules.hosted_tools == "refuse":
        if dropped:
            types = ", ".join(dict.fromkeys(dropped.values()))
            message = f"Tools of type {types} are not served here, but functions that the agent runs. Leave them out"
            raise ApiError(ErrorCode.UNSUPPORTED, message, param="tools")
    elif isinstance(included := body.get("include"), list):
        overrides["include"] = without_hosted(included)
    kept = [tool for place, tool in enumerate(given) if place not in dropped]
    removed = _fields_without_tools(body.get("tool_choice"), kept, dropped)
    return Changes(overrides, removed, dropped, media, unread)


def _is_hosted(tool: object, namespaces: bool) -> bool:
    """Whether a service would run the tool itself, or no call of it can be read.

    Anything that is no tool is for vLLM to refuse.
    """
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if kind == NAMESPACE and namespaces and _functions(tool):
        return False
    if kind == CUSTOM and isinstance(tool, Mapping):
        return SCHEMA not in tool
    return isinstance(kind, str) and kind not in CLIENT_TOOLS


def _functions(tool: object) -> list[Mapping[str, Any]]:
    """The functions of a namespace."""
    inner = tool.get("tools") if isinstance(tool, Mapping) else None
    members = inner if isinstance(inner, list) else []
    return [member for member in members if isinstance(member, Mapping) and member.get("type") == "function"]


def _fields_without_tools(choice: object, kept: Sequence[Any], dropped: Mapping[int, str]) -> frozenset[str]:
    """The fields that mean nothing without the dropped tools, or where there are none."""
    if not kept:
        gone = {"tools", "tool_choice"} if dropped else () if needs_tools(choice) else {"tool_choice"}
        return frozenset({"parallel_tool_calls", *gone})
    if not dropped or not isinstance(choice, Mapping):
        return frozenset()
    names, named, allowed = set(_names(kept)), choice.get("name"), allowed_names(choice)
    gone = choice.get("type") in dropped.values() or (named is not None and named not in names)
    if allowed is not None:  # of those that it allows none is left
        gone = names.isdisjoint(allowed)
    return frozenset({"tool_choice"}) if gone else frozenset()


def _names(tools: Iterable[Any]) -> Iterable[str]:
    for tool in tools:
        yield from _names(_functions(tool))
        if isinstance(tool, Mapping):
            function = tool.get("function")
            name = (function if isinstance(function, Mapping) else tool).get("name")
            if isinstance(name, str):
                yield name


def check_schemas(body: Mapping[str, Any], limit: int) -> None:
    """Raises ApiError when objects and lists in a field with schemas are nested deeper than `limit`, or are too many.

    `structured_outputs` must be an object: vLLM's own check of it fails at anything else.
    """
    if not isinstance(body.get("structured_outputs"), dict | None):
        raise ApiError(ErrorCode.MALFORMED, "structured_outputs must be an object", param="structured_outputs")
    for name in SCHEMA_FIELDS:
        value = _with_read_texts(body.get(name)) if name == "structured_outputs" else body.get(name)
        if isinstance(value, (dict, list)) and is_deeper(value, limit):
            message = f"{name} has objects and lists nested more than {limit} deep. Use a flatter schema"
            raise ApiError(ErrorCode.OUT_OF_BOUNDS, message, param=name)
        if isinstance(value, (dict, list)) and _is_larger(value):
            message = f"{name} has more than {MAX_VALUES} values, or {MAX_TEXT} characters. Use a smaller schema"
            raise ApiError(ErrorCode.OUT_OF_BOUNDS, message, param=name)


def _with_read_texts(value: object) -> object:
    """With the schemas that are texts of JSON as objects, since vLLM reads them too.

    Raises:
        ApiError: one is no JSON.
    """
    if not isinstance(value, dict):
        return value
    texts = {name: value[name] for name in SCHEMAS_IN_TEXTS if isinstance(value.get(name), str)}
    try:
        return value | {name: json.loads(text) for name, text in texts.items()}
    except RecursionError as error:
        raise ApiError(ErrorCode.OUT_OF_BOUNDS, "a schema is nested too deeply", param="structured_outputs") from error
    except ValueError as error:
        message = f"a schema in a text is no JSON: {error}"
        raise ApiError(ErrorCode.MALFORMED, message, param="structured_outputs") from error


def _is_larger(value: object) -> bool:
    """Whether a JSON value has more than MAX_VALUES values, or its texts more than MAX_TEXT characters."""
    values, text, open_ones = 0, 0, [value]
    while open_ones and values <= MAX_VALUES and text <= MAX_TEXT:
        one = open_ones.pop()
        values += 1
        if isinstance(one, str):
            text += len(one)
        elif isinstance(one, dict):
            text += sum(map(len, one))
            open_ones.extend(one.values())
        elif isinstance(one, list):
            open_ones.extend(one)
    return values > MAX_VALUES or text > MAX_TEXT


def is_deeper(value: object, limit: int) -> bool:
    """Whether objects and lists in a JSON value are nested more than `limit` deep. Looks at each value once."""
    level = [value]
    for _ in range(limit + 1):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if type(outer) is dict else outer)  # type: ignore[attr-defined]
            if type(inner) is dict or type(inner) is list
        ]
        if not level:
            return False
    return True
