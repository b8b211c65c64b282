"""Short work stays in the event loop's thread.

vLLM renders and tokenizes in a thread of its own, so that a long prompt holds nobody up. Handing a short one over
costs more than the work, for both threads and the interpreter lock between them; so that only long ones go there.

vLLM's renderer of conversations, told what a session has on record.

Chat completions, Responses and Messages all come through `preprocess_chat` in chat form, so tokens in are tokens
out for each of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from vllm.entrypoints.chat_utils import parse_chat_messages
from vllm.exceptions import VLLMValidationError
from vllm.renderers import hf
from vllm.renderers.base import BaseRenderer
from vllm.renderers.hf import HfRenderer, resolve_chat_template_content_format
from vllm.renderers.online_renderer import OnlineRenderer

from seamless_verl.gateway.continuation import Continuation
from seamless_verl.gateway.prefix_index import seed_of, text_only
from seamless_verl.gateway.prompt_cache import PromptCache, key_of
from seamless_verl.gateway.request_context import CURRENT, Rendered, RequestContext
from seamless_verl.trajectory.records import tokens

SHORT = 4096  # characters: a millisecond's work


def is_short(value: Any) -> bool:
    """Whether all text in a JSON value together is short."""
    return _left(value, SHORT) >= 0


def stay_here(renderer: BaseRenderer) -> None:
    """Has a renderer do short work at once."""
    tokenize = renderer._tokenize_prompt
    renderer._tokenize_prompt_async = _nearby(tokenize, renderer._tokenize_prompt_async)
    if isinstance(renderer, hf.HfRenderer):
        template = hf.safe_apply_chat_template
        renderer._apply_chat_template_async = _nearby(template, renderer._apply_chat_template_async)


def _nearby(work: Callable[..., Any], elsewhere: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def wherever(*args: Any, **options: Any) -> Any:
        if is_short(args) and is_short(options):
            return work(*args, **options)
        return await elsewhere(*args, **options)

    return wherever


def _left(value: Any, room: int) -> int:
    """What is left of the room, in characters; anything below 0 when it does not suffice."""
    if isinstance(value, str):
        return room - len(value)
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return room
    for part in value:
        room = _left(part, room - 1)
        if room < 0:
            break
    return room


NOT_SETTINGS = ("add_generation_prompt", "continue_final_message", "tools", "tokenize", "documents")
OPEN_ENDED = ("truncate_prompt_tokens", "return_assistant_tokens_mask", "return_token_offsets", "chat_template")
"""Request fields whose meaning needs the whole conversation rendered."""
IN_THE_PROMPT = ("add_special_tokens", "tool_choice", "response_format")
"""Those that shape it beside the conversation, its tools and the template's settings."""
TEXT_TOO = ("echo", "return_prompt_text")
"""And those that the ids of a prompt are not enough for."""


class SessionRenderer(OnlineRenderer):
    """Renders a conversation's known beginning as its recorded ids, the rest by the chat template."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        stay_here(self.renderer)
        self._prompts = PromptCache()
        self._continuation = (
            Continuation(self.renderer.get_tokenizer(), self.model_config.hf_config.model_type, self.chat_template)
            if isinstance(self.renderer, HfRenderer)
            else None
        )

    async def preprocess_chat(
        self,
        request: Any,
        messages: list[Any],
        default_template: str | None,
        default_template_content_format: Any,
        default_template_kwargs: dict[str, Any] | None,
        tool_dicts: list[dict[str, Any]] | None = None,
        parser: Any = None,
        **options: Any,
    ) -> tuple[list[Any], list[Any]]:
        _check(messages)
        exchange = CURRENT.get()
        ids = key = None
        if exchange is not None:
            params = request.build_chat_params(default_template, default_template_content_format)
            settings = params.with_defaults(default_template_kwargs).chat_template_kwargs
            exchange.rendered = _rendered(request, messages, tool_dicts, parser, settings)
            ids = await self._continued(exchange, settings, default_template_content_format)
            if ids is None and (key := _key(exchange.rendered, settings)) is not None:
                ids = self._known(request, key)
        if ids is not None:
            request.kv_transfer_params = {"prompt_token_ids": ids}
        result: tuple[list[Any], list[Any]] = await super().preprocess_chat(
            request,
            messages,
            default_template,
            default_template_content_format,
            default_template_kwargs,
            tool_dicts,
            parser,
            **options,
        )
        if ids is not None:
            request.kv_transfer_params = None
        elif key is not None:
            self._prompts.put(key, tokens(result[1][0]["prompt_token_ids"]))
        return result

    def _known(self, request: Any, key: bytes) -> list[int] | None:
        """The prompt as it was rendered before; one that is too long vLLM renders again, and says so."""
        ids = self._prompts.get(key)
        limit = request.build_tok_params(self.model_config).max_input_tokens
        return None if ids is None or (limit is not None and len(ids) > limit) else ids.tolist()

    async def _continued(self, exchange: RequestContext, settings: Mapping[str, Any], form: Any) -> list[int] | None:
        """The prompt's ids where its beginning is on record, else None."""
        rendered = exchange.rendered
        assert rendered is not None
        if self._continuation is None or not _appends(rendered.request, settings):
            return None
        known = exchange.session.memory.longest(rendered.seed, rendered.messages)
        if known is None:
            return None
        conversation = self._conversation(rendered, form)
        if len(conversation) != len(rendered.messages):
            return None
        extend = partial(
            self._continuation.extended,
            known.trunk.ids(),
            conversation,
            known.count,
            rendered.tools,
            rendered.settings,
        )
        # A long tool result takes long to tokenize.
        new = conversation[known.count :]
        ids = extend() if is_short(new) and is_short(rendered.tools) else await asyncio.to_thread(extend)
        if ids is not None:
            exchange.rendered = replace(rendered, known=known)
        return ids

    def _conversation(self, rendered: Rendered, form: Any) -> list[Any]:
        """The messages as templates expect them, which is vLLM's own work."""
        form = resolve_chat_template_content_format(
            chat_template=self.chat_template,
            tools=rendered.tools,
            given_format=form,
            tokenizer=self.renderer.get_tokenizer(),
            model_config=self.model_config,
        )
        parsed = parse_chat_messages(list(rendered.messages), self.model_config, content_format=form)
        return list(parsed[0])


def _check(messages: Sequence[Any]) -> None:
    """Raises VLLMValidationError for an item of a conversation that is no message: the Responses API knows kinds of
    items that vLLM leaves as they came."""
    for message in messages:
        if isinstance(message, Mapping) and not isinstance(message.get("role"), str):
            kind = message.get("type")
            raise VLLMValidationError(f"an item of type {kind!r} is no message, call or result of a call; leave it out")


def _rendered(request: Any, messages: list[Any], tools: Any, parser: Any, settings: Mapping[str, Any]) -> Rendered:
    kept = {name: value for name, value in settings.items() if name not in NOT_SETTINGS and value is not None}
    plain = [_plain(message) for message in messages]
    return Rendered(request, plain, tools, parser, kept, seed_of(tools, kept))


def _appends(request: Any, settings: Mapping[str, Any]) -> bool:
    """Whether the prompt is the conversation and the beginning of a reply, no more and no less."""
    said = vars(request)  # a model that lacks a field takes long to say so
    if said.get("truncation", "disabled") not in (None, "disabled"):
        return False
    if settings.get("documents") or any(said.get(name) for name in OPEN_ENDED):
        return False
    return bool(settings.get("add_generation_prompt")) and not settings.get("continue_final_message")


def _key(rendered: Rendered, settings: Mapping[str, Any]) -> bytes | None:
    """What all that are rendered to the same prompt have alike; None for one that is more than text, or of which more
    is asked than its ids."""
    said = vars(rendered.request)
    if (
        any(said.get(name) for name in TEXT_TOO)
        or not text_only(rendered.messages)
        or not _appends(rendered.request, settings)
    ):
        return None
    return key_of(rendered.tools, settings, [said.get(name) for name in IN_THE_PROMPT], rendered.messages)


def _plain(message: Any) -> dict[str, Any]:
    """A message as plain JSON values: the Responses API leaves objects of its SDK in contents."""
    plain = dict(message)
    content = plain.get("content")
    if isinstance(content, list):
        plain["content"] = [part.model_dump() if hasattr(part, "model_dump") else part for part in content]
    return plain
