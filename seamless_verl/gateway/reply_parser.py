"""Parses replies so that a streamed one says what a whole one says, and lets a reply be tool calls or a schema's JSON.

vLLM has a parser for a whole reply and one for its stream, which disagree about tool calls that cannot be read. Here
the whole reply's decides: a stream gives reasoning and text as they arrive, and the tool calls at its end.

vLLM binds a reply to a JSON schema from its first token on, so that no tool is ever called, or forgets the schema where
a tool is strict. Here one grammar has both, where vLLM has one for the calls of the model's parser; elsewhere the
schema is left out.

Invariants:
- Streamed parts, put together, are the whole reply's reasoning, text and calls; both are what the recorder keeps.
- A reply whose tool calls cannot all be read has none: what the model wrote is its text. The arguments of a call are a
  JSON object in Unicode.
- Whether a reply begins with thoughts is said by the last turn of its prompt alone: a session keeps the thoughts of
  earlier turns, and vLLM's parsers look for the end of any.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from vllm.entrypoints.chat_utils import make_tool_call_id
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.parser.abstract_parser import DelegatingParser
from vllm.sampling_params import StructuredOutputsParams
from xgrammar import Grammar, StructuralTag
from xgrammar.structural_tag import JSONSchemaFormat, OrFormat

from seamless_verl.gateway.request_context import CURRENT
from seamless_verl.platform.vllm_versions import DeltaFunctionCall, DeltaMessage, DeltaToolCall

logger = logging.getLogger(__name__)
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<turn|>", "<|endoftext|>")
"""What models end a turn with, beside the end token of their tokenizer, which may be another one of a base model."""
PARSER_MODULES = ("vllm.tool_parsers", "vllm.parser", "vllm.reasoning")
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
MAX_GRAMMARS = 64  # of which it is kept whether they can be used: an agent sends the same ones in each call
OWN_GRAMMARS = ("vllm.parser.harmony", "vllm.parser.mistral")
"""Modules of parsers that make grammars of schemas and calls themselves, by their models' formats."""
_errors: ContextVar[list[str] | None] = ContextVar("errors of a parser", default=None)


@dataclass(frozen=True)
class ParsedReply:
    """The parts of a reply; `malformed` says why its tool calls were taken for text, if they were."""

    reasoning: str | None
    content: str | None
    calls: Sequence[Any]
    malformed: str | None = None


@lru_cache
def consistent_parser(base: type[Any]) -> type[Any]:
    """A parser class of vLLM whose streams say what its whole replies say."""
    for cls in base.__mro__:
        _collect_errors(cls)
    for name in ("reasoning_parser_cls", "tool_parser_cls"):
        for cls in getattr(getattr(base, name, None), "__mro__", ()):
            _collect_errors(cls)
    return type(f"Consistent{base.__name__}", (_ConsistentParser, base), {"base": base})


class _ConsistentParser:
    """Mixed in before a parser class of vLLM, `base`, of which it makes new ones for whole replies."""

    base: type[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._arguments = args, kwargs
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._prompt: list[int] | None = None  # its last turn
        self._sent_reasoning = self._sent_content = self._held = ""

    def adjust_request(self, request: Any) -> Any:
        """The request with the grammar of its reply. A JSON schema does not keep the model from calling a tool."""
        makes_own = any(cls.__module__ in OWN_GRAMMARS for cls in self.base.__mro__)
        schema = None if makes_own else text_schema(request)
        tool_parser = getattr(self, "tool_parser", None)
        if schema is None or (tool_parser is None and issubclass(self.base, DelegatingParser)):  # it reads no calls
            return super().adjust_request(request)  # type: ignore[misc]
        outputs = calls_or_schema(schema, tool_parser, request)
        if isinstance(request, ResponsesRequest):
            request.text = request.text.model_copy(update={"format": None})
        else:
            request.response_format = None
        request = super().adjust_request(request)  # type: ignore[misc]
        if outputs is not None:
            request.structured_outputs = outputs  # also in the place of the grammar for strict tools, which it contains
            return request
        warn_of_dropped_schemas()
        if (context := CURRENT.get()) is not None:
            context.dropped_schema = True
        return request

    def parse_reply(self, text: str, request: Any, ids: Sequence[int], *, auto_tools: bool = True) -> ParsedReply:
        """A whole reply, whatever was streamed of it."""
        if not offers_tools(request):
            return self._as_text(text, request)
        with _collected_errors() as errors:
            try:
                reasoning, content, calls = self._new().parse(
                    text, request, enable_auto_tools=auto_tools, model_output_token_ids=ids
                )
                calls = [_checked(call) for call in calls or ()]
            except Exception as error:  # a parser may fail in any way at what a model wrote
                return self._as_text(text, request, f"{type(error).__name__}: {error}")
        if getattr(request, "parallel_tool_calls", None) is False:
            calls = calls[:1]
        if calls:
            return ParsedReply(reasoning, content, calls)
        reply = self._as_text(text, request, errors[0] if errors else None)
        required = request.tool_choice not in (None, "auto", "none")
        if not reply.malformed and required and (reply.content or "").strip():
            return ParsedReply(reply.reasoning, reply.content, (), "a call was required, and none can be read")
        return reply

    def parse(
        self, model_output: str, request: Any, enable_auto_tools: bool = False, model_output_token_ids: Any = ()
    ) -> tuple[str | None, str | None, list[Any] | None]:
        reply = self.parse_reply(model_output, request, model_output_token_ids, auto_tools=enable_auto_tools)
        return reply.reasoning, reply.content, list(reply.calls) or None

    def parse_delta(
        self,
        delta_text: str,
        delta_token_ids: list[int],
        request: Any,
        prompt_token_ids: list[int] | None = None,
        *,
        finished: bool,
    ) -> Any:
        self._texts.append(delta_text)
        self._ids.extend(delta_token_ids)
        if prompt_token_ids is not None and self._prompt is None:  # vLLM gives it with each part
            self._prompt = self._last_turn(prompt_token_ids)
        if not offers_tools(request):
            self.tool_parser = None
        with _collected_errors():
            try:
                delta = super().parse_delta(  # type: ignore[misc]
                    delta_text, delta_token_ids, request, self._prompt, finished=finished
                )
            except Exception as error:  # the end of the stream gives what the whole reply's parser finds
                logger.debug("streamed later: %s", error)
                delta = None
        reasoning = self._thoughts(getattr(delta, "reasoning", None) or "")
        content = self._visible(getattr(delta, "content", None) or "", request)
        self._sent_reasoning += reasoning
        self._sent_content += content
        if finished:
            return self._finished(reasoning, content, request)
        shown = _delta(reasoning, content)
        return DeltaMessage(content="") if shown is None and getattr(request, "logprobs", None) else shown

    def _thoughts(self, reasoning: str) -> str:
        """Without the token that opens them, which is no part of a whole reply's, at their beginning."""
        opening = getattr(getattr(self, "reasoning_parser", None), "start_token", None)
        return reasoning if self._sent_reasoning or not isinstance(opening, str) else reasoning.removeprefix(opening)

    def is_reasoning_end(self, input_ids: list[int]) -> bool:
        """Whether thoughts have ended before the first token of a reply to these ids, or at the end of these of one."""
        ended: bool = super().is_reasoning_end(self._last_turn(input_ids))  # type: ignore[misc]
        return ended

    def _last_turn(self, ids: Sequence[int]) -> list[int]:
        """The ids behind the end of the last turn that others follow."""
        args, kwargs = self._arguments
        ends = turn_ends(args[0] if args else kwargs["tokenizer"])
        begin = next((place + 1 for place in range(len(ids) - 2, -1, -1) if ids[place] in ends), 0)
        return list(ids[begin:])

    def _visible(self, content: str, request: Any) -> str:
        """The text but for white space that is not known yet to be the whole reply's.

        At its beginning vLLM 0.24 loses some after thoughts; at its end it does not count before a tool call.
        """
        content, self._held = self._held + content, ""
        if not self._sent_content:
            if not content.strip():
                self._held = content
                return ""
            whole = self._as_text("".join(self._texts), request).content or ""
            content = whole[: len(whole) - len(whole.lstrip())] + content.lstrip()
        if not offers_tools(request):
            return content
        visible = content.rstrip()
        self._held = content[len(visible) :]
        return visible

    def _finished(self, reasoning: str, content: str, request: Any) -> Any:
        whole = self.parse_reply("".join(self._texts), request, self._ids)
        if getattr(request, "include_reasoning", True):
            reasoning += _remaining(whole.reasoning, self._sent_reasoning)
        content += _remaining(whole.content, self._sent_content)
        return _delta(reasoning, content, whole.calls)

    def _as_text(self, text: str, request: Any, malformed: str | None = None) -> ParsedReply:
        if issubclass(self.base, DelegatingParser) and self.base.reasoning_parser_cls is None:
            return ParsedReply(None, text, (), malformed)
        reasoning, content = self._new().extract_reasoning(text, request)
        return ParsedReply(reasoning, content, (), malformed)

    def _new(self) -> Any:
        args, kwargs = self._arguments
        return self.base(*args, **kwargs)


@lru_cache(maxsize=4)
def turn_ends(tokenizer: Any) -> frozenset[int]:
    """The ids of the tokens that end a turn."""
    vocabulary = tokenizer.get_vocab()
    known = {vocabulary[token] for token in TURN_ENDS if token in vocabulary}
    return frozenset(known | {tokenizer.eos_token_id} - {None})


def offers_tools(request: Any) -> bool:
    return bool(request.tools) and request.tool_choice != "none"


def _delta(reasoning: str, content: str, calls: Sequence[Any] = ()) -> Any:
    """A part of a stream; None for an empty one."""
    if not (reasoning or content or calls):
        return None
    fields: dict[str, Any] = {"reasoning": reasoning} if reasoning else {}
    if content:
        fields["content"] = content
    if calls:
        functions = [DeltaFunctionCall(name=call.name, arguments=call.arguments) for call in calls]
        ids = [getattr(call, "id", None) or make_tool_call_id() for call in calls]
        whole = enumerate(zip(ids, functions, strict=True))
        fields["tool_calls"] = [
            DeltaToolCall(index=index, id=name, type="function", function=one) for index, (name, one) in whole
        ]
    return DeltaMessage(**fields)


def _remaining(whole: str | None, sent: str) -> str:
    """What was not sent of the whole; parsers differ in white space at the beginning."""
    whole = whole or ""
    if whole.startswith(sent):
        return whole[len(sent) :]
    if (stripped := whole.lstrip()).startswith(sent.lstrip()):
        return stripped[len(sent.lstrip()) :]
    logger.warning("a stream gave %d characters that are no beginning of the whole reply", len(sent))
    return ""


def _checked(call: Any) -> Any:
    """The call; raises ValueError unless its arguments are a JSON object in Unicode."""
    if not call.arguments or not call.arguments.strip():
        call.arguments = "{}"
    call.name.encode()
    call.arguments.encode()
    arguments = json.loads(call.arguments, parse_constant=_refuse_constant)
    if not call.name or not isinstance(arguments, dict):
        raise ValueError(f"the arguments of {call.name!r} are no JSON object")
    return call


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


@contextmanager
def _collected_errors() -> Iterator[list[str]]:
    """Collects the errors that vLLM's parsers would log with a traceback."""
    errors: list[str] = []
    token = _errors.set(errors)
    try:
        yield errors
    finally:
        _errors.reset(token)


class _ErrorFilter(logging.Filter):
    """Takes errors of a reply out of the log, where its parsing is under way."""

    def filter(self, record: logging.LogRecord) -> bool:
        errors = _errors.get()
        if errors is None or not record.exc_info:
            return True
        error = record.exc_info[1]
        errors.append(f"{type(error).__name__}: {error}")
        return False


_FILTER = _ErrorFilter()


def _collect_errors(cls: type[Any]) -> None:
    if cls.__module__.startswith(PARSER_MODULES) and cls.__module__ in sys.modules:
        logging.getLogger(cls.__module__).addFilter(_FILTER)  # adding it again changes nothing


def text_schema(request: Any) -> Mapping[str, Any] | None:
    """The JSON schema that a request wants the text of its reply to have, if the model may call a tool instead."""
    if not request.tools or request.tool_choice not in (None, "auto"):
        return None
    if isinstance(request, ResponsesRequest):  # by the class: a chat's body may have a `text` that vLLM ignores
        wanted = None if request.text is None else request.text.format
    else:
        wanted = getattr(request, "response_format", None)
    kind = getattr(wanted, "type", None)
    if kind == "json_object":
        return ANY_OBJECT
    if kind != "json_schema":
        return None
    inner = getattr(wanted, "json_schema", None)
    schema: Mapping[str, Any] | None = wanted.schema_ if inner is None else inner.json_schema
    return schema


def calls_or_schema(schema: Mapping[str, Any], tool_parser: Any, request: Any) -> StructuredOutputsParams | None:
    """The grammar of a reply that is calls of the request's tools, or JSON of the schema.

    None where vLLM has no grammar for calls as this parser reads them, or none for these tools or this schema.
    """
    if tool_parser is None or tool_parser.structural_tag_model is None:
        return None
    forced = request.model_copy(update={"tool_choice": "required"})
    try:
        calls = tool_parser.get_structural_tag(forced, reasoning=False)
    except Exception as error:  # whatever vLLM or xgrammar says of a tool that it makes no grammar of
        logger.info("no grammar for calls of these tools: %s", error)
        return None
    if calls is None:
        return None
    either = StructuralTag(format=OrFormat(elements=[calls.format, JSONSchemaFormat(json_schema=dict(schema))]))
    text = json.dumps(either.model_dump())
    return StructuredOutputsParams(structural_tag=text) if _is_grammar(text) else None


@lru_cache(MAX_GRAMMARS)
def _is_grammar(structural_tag: str) -> bool:
    try:
        Grammar.from_structural_tag(structural_tag)
    except Exception as error:  # xgrammar has several for what a schema may contain, and vLLM makes a 400 of each
        logger.info("no grammar for calls or this schema: %s", error)
        return False
    return True


@lru_cache(1)
def warn_of_dropped_schemas() -> None:
    """Logs it once in a process: agents send such requests in each turn."""
    logger.warning(
        "the JSON schema of a request's reply is left out where the model may call tools, and vLLM has no grammar for "
        "both (docs/gateway.md); gateway/schemas_dropped counts them"
    )
