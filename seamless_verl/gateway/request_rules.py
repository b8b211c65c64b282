"""What a request may ask for: bounds, hosted tools, media and output tokens, and forms that vLLM does not read.

Agents send what the real services accept. The gateway changes the body that vLLM gets into one that means the same; the
recorded request is the agent's. A model that takes images is given them. All other media become placeholders: vLLM's
classes refuse some of them, and put an Anthropic tool result's images behind an empty result.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, TypeAlias

from seamless_verl.gateway.api_errors import ApiError, ErrorCode
from seamless_verl.gateway.images import IMAGE, TakenImages
from seamless_verl.runtime.fields import Positive, check
from seamless_verl.trajectory.messages import ASSISTANT

HostedTools: TypeAlias = Literal["drop", "refuse"]
Media: TypeAlias = Literal["replace", "refuse"]
OUTPUT_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
"""Names under which the APIs bound the output tokens of a call."""
SCHEMA_FIELDS = ("tools", "response_format", "structured_outputs", "output_config", "text")
"""Fields with JSON schemas, which become grammars."""
SCHEMAS_IN_TEXTS = ("json", "structural_tag")  # Fields of `structured_outputs` that may hold JSON in a text
CLIENT_TOOLS = frozenset({None, "function"})
"""Types of tools that the agent runs; Anthropic's API has none, or `custom`."""
CUSTOM, SCHEMA = "custom", "input_schema"
"""The type of Anthropic's tools, which have a schema, and of OpenAI's tools whose argument is a free text. No parser of
vLLM reads a call of the second kind, so that they are left out as hosted ones are."""
NAMESPACE = "namespace"
"""The type of a group of tools under one name; the agent runs those of them that are functions, as Codex does its
sub-agents."""
NEVER_LEFT_OUT = frozenset({"model", "messages", "prompt", "input"})
"""Fields of which an empty one is asked as it is, or refused: they are what is asked, and of which model."""
MESSAGE, REFUSAL = "message", "refusal"
ALLOWED_TOOLS = "allowed_tools"
MODES = ("auto", "required")
HOSTED_CALLS = ("_call", "_call_output")
"""How items end that a service's own tools make: `web_search_call.results` asks for a field of one."""
MEDIA_KINDS = ("image", "audio", "video", "file", "document")
PLACEHOLDER = "[{kind} left out: this model is given text only]"
TEXT_TYPES = {"messages": "text", "input": "input_text"}
"""Fields of a body that hold messages, and the type that a part of text has there."""
MAX_BODY = 32 << 20  # bytes of a request: near 8 million tokens of text
MAX_VALUES, MAX_TEXT = 20_000, 1 << 20
"""Values and characters in one field with schemas: the gateway compiles as many in about a second."""


@dataclass(frozen=True)
class RequestRules:
    """Bounds of one request; raises ConfigError for one that is not a whole number above 0."""

    strict_model: bool = False  # refuses model names that are not served
    hosted_tools: HostedTools = "drop"
    media: Media = "replace"
    max_choices: Positive = 128  # calls of a request: its choices, for each of its prompts
    max_nesting: Positive = 64  # of objects and lists in tools and schemas
    max_stored: Positive = 64  # responses that a session keeps

    def __post_init__(self) -> None:
        check(self, key="requests")


@dataclass(frozen=True)
class Adapted:
    """The body that vLLM gets in the place of a request's, a new dict, and what was left out of it."""

    body: dict[str, Any]
    dropped_tools: tuple[str, ...] = ()  # types of hosted tools
    replaced_media: tuple[str, ...] = ()  # the kinds of what became a placeholder
    images: Mapping[str, bytes] = field(default_factory=dict)  # the files of those that the model is given, by sha256


def count_calls(body: Mapping[str, Any], rules: RequestRules) -> int:
    """The request's calls: its choices, for each of its prompts; raises ApiError for more than `max_choices`.

    Values of a wrong type are for vLLM to refuse, which takes digits in a text for a number, too.
    """
    prompt = _list(body.get("prompt"))
    prompts = len(prompt) if prompt and not isinstance(prompt[0], int) else 1
    choices = body.get("n")
    try:
        calls = prompts * max(int(choices), 1) if isinstance(choices, (int, float, str)) else prompts
    except (ValueError, OverflowError):
        calls = prompts
    if calls > rules.max_choices:
        shown = str(calls) if calls < 1_000_000_000 else "More than a billion"
        message = f"{shown} choices in one request: at most {rules.max_choices} are served"
        raise ApiError(ErrorCode.OUT_OF_BOUNDS, message, param="prompt" if prompts > rules.max_choices else "n")
    return calls


def _mapping(value: object) -> Mapping[str, Any]:
    """The value if it is an object, else an empty one: what has another type is for vLLM to refuse."""
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def adapt(
    body: Mapping[str, Any],
    rules: RequestRules,
    context: int,
    sampling: Mapping[str, Any] | None = None,
    *,
    namespaces: bool = False,
    images: bool = False,
) -> Adapted:
    """The request's body for a model with room for `context` tokens; `sampling` is the session's.

    `namespaces`: the API that is called, in this version of vLLM, takes namespaces of tools. `images`: the model takes
    them. Raises ApiError where a schema is no object, or nested too deeply, a hosted tool or a medium is refused, or an
    image cannot be taken.
    """
    check_schemas(body, rules.max_nesting)
    found = media_in(body)
    media = tuple(kind for kind in found if not (images and kind == IMAGE))
    param = "messages" if "messages" in body else "input"
    if media and rules.media == "refuse":
        given = "text and images" if images else "text"
        message = f"The model is given {given} only, and no {', '.join(dict.fromkeys(media))}. Leave it out"
        raise ApiError(ErrorCode.UNSUPPORTED, message, param=param)
    taken = TakenImages(param)
    replaced = replace_media(body, taken if images else None) if found else {}
    changed = {**body, **(sampling or {}), **replaced}
    for name in OUTPUT_LIMITS:
        if isinstance(limit := body.get(name), int) and limit > context:
            changed[name] = context
    if (mode := allowed_tools_mode(body.get("tool_choice"))) is not None:
        changed["tool_choice"] = mode
    given = _list(body.get("tools"))
    dropped = tuple(tool["type"] for tool in given if _is_hosted(tool, namespaces))
    kept = [tool for tool in given if not _is_hosted(tool, namespaces)]
    if rules.hosted_tools == "refuse":
        if dropped:
            types = ", ".join(dict.fromkeys(dropped))
            message = f"Tools of type {types} are not served here, but functions that the agent runs. Leave them out"
            raise ApiError(ErrorCode.UNSUPPORTED, message, param="tools")
    elif isinstance(included := body.get("include"), list):
        changed["include"] = without_hosted(included)
    if dropped:
        changed["tools"] = kept
    if isinstance(items := changed.get("input"), list):
        changed["input"] = [_readable(item) if is_unread_message(item) else item for item in items]
    for name in _fields_without_tools(body.get("tool_choice"), kept, dropped):
        changed.pop(name, None)
    return Adapted(changed, dropped, media, taken.files)


def _is_hosted(tool: object, namespaces: bool) -> bool:
    """Whether a service would run the tool itself, or no call of it can be read."""
    kind = _mapping(tool).get("type")
    if kind == NAMESPACE and namespaces and _functions(tool):
        return False
    if kind == CUSTOM:
        return SCHEMA not in _mapping(tool)
    return isinstance(kind, str) and kind not in CLIENT_TOOLS


def _functions(tool: object) -> list[Mapping[str, Any]]:
    """The functions of a namespace."""
    return [member for member in _list(_mapping(tool).get("tools")) if _mapping(member).get("type") == "function"]


def _fields_without_tools(choice: object, kept: Sequence[Any], dropped: Sequence[str]) -> frozenset[str]:
    """The fields that mean nothing without the dropped tools, or where there are none."""
    if not kept:
        gone = {"tools", "tool_choice"} if dropped else () if needs_tools(choice) else {"tool_choice"}
        return frozenset({"parallel_tool_calls", *gone})
    if not dropped or not isinstance(choice, Mapping):
        return frozenset()
    names, named, allowed = set(_names(kept)), choice.get("name"), allowed_names(choice)
    gone = choice.get("type") in dropped or (named is not None and named not in names)
    if allowed is not None:  # of those that it allows none is left
        gone = names.isdisjoint(allowed)
    return frozenset({"tool_choice"}) if gone else frozenset()


def _names(tools: Iterable[Any]) -> Iterator[str]:
    for tool in tools:
        yield from _names(_functions(tool))
        function = _mapping(tool).get("function")
        if isinstance(name := _mapping(function if isinstance(function, Mapping) else tool).get("name"), str):
            yield name


def check_schemas(body: Mapping[str, Any], limit: int) -> None:
    """Raises ApiError when objects and lists in a field with schemas are nested deeper than `limit`, or are too many.

    `structured_outputs` must be an object: vLLM's own check of it fails at anything else.
    """
    if not isinstance(body.get("structured_outputs"), dict | None):
        raise ApiError(ErrorCode.MALFORMED, "structured_outputs must be an object", param="structured_outputs")
    for name in SCHEMA_FIELDS:
        value = _with_read_texts(body.get(name)) if name == "structured_outputs" else body.get(name)
        if not isinstance(value, (dict, list)):
            continue
        if is_deeper(value, limit):
            message = f"{name} has objects and lists nested more than {limit} deep. Use a flatter schema"
            raise ApiError(ErrorCode.OUT_OF_BOUNDS, message, param=name)
        if _is_larger(value):
            message = f"{name} has more than {MAX_VALUES} values, or {MAX_TEXT} characters. Use a smaller schema"
            raise ApiError(ErrorCode.OUT_OF_BOUNDS, message, param=name)


def _with_read_texts(value: object) -> object:
    """With the schemas that are texts of JSON as objects, since vLLM reads them too; raises ApiError for no JSON."""
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


def without_empty(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body without its empty fields, and its messages and items without those that are null.

    Clients write what they leave out as null, "", [] or {}. Each API of vLLM takes some of them and refuses others.
    """
    given = {name: value for name, value in body.items() if name in NEVER_LEFT_OUT or not is_empty(value)}
    lists = {name: value for name in TEXT_TYPES if isinstance(value := given.get(name), list)}
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
    reference to an item. Of an assistant's message vLLM reads the first text alone, and no refusal; vLLM 0.24 takes
    its content, where it is a text, for a list.
    """
    fields = _mapping(item)
    content, role, kind = fields.get("content"), fields.get("role"), fields.get("type")
    if isinstance(content, str):
        return kind == MESSAGE and role == ASSISTANT
    if not isinstance(content, list) or not isinstance(role, str):
        return False
    if kind is None:
        return True
    alone = len(content) == 1 and _mapping(content[0]).get("type") != REFUSAL
    return bool(kind == MESSAGE and role == ASSISTANT and not alone)


def _readable(item: Mapping[str, Any]) -> dict[str, Any]:
    typed, content = {**item, "type": MESSAGE}, item["content"]
    texts = [content] if isinstance(content, str) else [text_of(part) for part in content]
    if item["role"] != ASSISTANT or None in texts:  # what is no text is for vLLM to refuse
        return typed
    text = "".join(text for text in texts if text is not None)
    return {**typed, "content": [{"type": "output_text", "text": text, "annotations": []}]}


def text_of(part: object) -> str | None:
    """The text of a part of an assistant's message, also that of a refusal; None for what is none."""
    fields = _mapping(part)
    text = fields.get(REFUSAL if fields.get("type") == REFUSAL else "text")
    return text if isinstance(text, str) else None


def allowed_tools_mode(choice: object) -> str | None:
    """The choice, `auto` or `required`, among some of the tools; None for any other choice.

    The prompt shows all tools, as with the real service, where the choice exists to leave the prompt as it is.
    """
    mode = _mapping(_allowed(choice)).get("mode")
    return mode if mode in MODES else None


def needs_tools(choice: object) -> bool:
    """Whether a choice of tools asks for a call; `auto` and `none` mean nothing without tools."""
    return (choice.get("type") if isinstance(choice, Mapping) else choice) not in (None, "auto", "none")


def allowed_names(choice: object) -> set[str] | None:
    """The names of the functions that a choice allows; None for another choice."""
    if (allowed := _allowed(choice)) is None:
        return None
    functions = [_mapping(_mapping(tool).get("function", tool)) for tool in _list(allowed.get("tools"))]
    return {name for function in functions if isinstance(name := function.get("name"), str)}


def _allowed(choice: object) -> Mapping[str, Any] | None:
    """What a choice of `allowed_tools` says: in chats within a field of this name, in responses beside its type."""
    fields = _mapping(choice)
    inner = fields.get(ALLOWED_TOOLS, choice) if fields.get("type") == ALLOWED_TOOLS else None
    return inner if isinstance(inner, Mapping) else None


def without_hosted(included: Sequence[Any]) -> list[Any]:
    """What a request wants included in its response, without what only hosted tools have."""
    return [name for name in included if not (isinstance(name, str) and name.partition(".")[0].endswith(HOSTED_CALLS))]


def media_in(body: Mapping[str, Any]) -> list[str]:
    """The kinds of all media in a body's messages, in their order."""
    parts = (part for name in TEXT_TYPES for part in _parts_in(body.get(name)))
    return [kind for part in parts if (kind := media_kind(part)) is not None]


def replace_media(body: Mapping[str, Any], taken: TakenImages | None = None) -> dict[str, Any]:
    """The fields of the body that hold messages, as new lists in which all media are placeholders.

    Images are `taken` where the model takes them.
    """
    lists = _lists(body, *TEXT_TYPES)
    return {
        name: [_without_media(entry, TEXT_TYPES[name], taken) for entry in entries] for name, entries in lists.items()
    }


def media_kind(part: object) -> str | None:
    """What a part of a message holds that is no text: one of MEDIA_KINDS; None for a text, and for what is no part."""
    fields = _mapping(part)
    names = [fields["type"]] if isinstance(fields.get("type"), str) else list(fields)
    return next((kind for kind in MEDIA_KINDS for name in names if kind in str(name).split("_")), None)


def _parts_in(entries: object) -> Iterator[Any]:
    """Of messages and, in the Responses API, of outputs of calls; also of a call's result in Anthropic's messages."""
    for entry in _list(entries):
        for part in chain.from_iterable(_lists(entry, "content", "output").values()):
            yield from _lists(part, "content").get("content", [part])


def _lists(entry: object, *names: str) -> dict[str, list[Any]]:
    """Those of these fields that are lists."""
    return {name: parts for name in names if isinstance(parts := _mapping(entry).get(name), list)}


def _without_media(entry: Any, text: str, taken: TakenImages | None) -> Any:
    """A message, or an output of a call; `text` is the type of a part of text."""

    def changed(part: Any) -> Any:
        inner = _lists(part, "content").get("content")
        return placed(part) if inner is None else {**part, "content": list(map(placed, inner))}

    def placed(part: Any) -> Any:
        if (kind := media_kind(part)) is None:
            return part
        if kind == IMAGE and taken is not None:
            return taken.take(part)
        return {"type": text, "text": _document_text(part) or PLACEHOLDER.format(kind=kind)}

    lists = _lists(entry, "content", "output")
    return {**entry, **{name: list(map(changed, parts)) for name, parts in lists.items()}} if lists else entry


def _document_text(part: Mapping[str, Any]) -> str | None:
    """The text of an Anthropic document that is one."""
    source = _mapping(part.get("source"))
    found = source.get("data") if source.get("type") == "text" else None
    return found if isinstance(found, str) else None
