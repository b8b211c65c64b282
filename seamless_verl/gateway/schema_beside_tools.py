"""A JSON schema for the reply of a request with tools: it binds the text, and leaves the model free to call a tool.

vLLM binds a reply to the schema from its first token on, so that no tool is ever called, or forgets the schema where a
tool is strict. Here the reply is calls of tools or JSON of the schema, in one grammar, where vLLM has one for the calls
of the model's parser; elsewhere the schema is left out.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.sampling_params import StructuredOutputsParams
from xgrammar import Grammar, StructuralTag
from xgrammar.structural_tag import JSONSchemaFormat, OrFormat

logger = logging.getLogger(__name__)
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
MAX_GRAMMARS = 64  # of which it is kept whether they can be used: an agent sends the same ones in each call
OWN_GRAMMARS = ("vllm.parser.harmony", "vllm.parser.mistral")
"""Modules of parsers that make grammars of schemas and calls themselves, by their models' formats."""


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


def has_own_grammars(parser_class: type[Any]) -> bool:
    return any(cls.__module__ in OWN_GRAMMARS for cls in parser_class.__mro__)


def remove_schema(request: Any) -> None:
    if isinstance(request, ResponsesRequest):
        request.text = request.text.model_copy(update={"format": None})
    else:
        request.response_format = None


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
        "both (docs/agents.md); gateway/schemas_dropped counts them"
    )
