"""Renders conversations to prompts: vLLM's renderer, which begins a prompt with the session's recorded ids.

All APIs come through `preprocess_chat` in chat form. A prompt that was rendered a moment ago is not rendered again.

vLLM renders and tokenizes in a thread of its own. Short prompts are done in the event loop's: a hand-over costs 0.06 ms
of CPU, two of them a tenth of a short call, and in a busy process a wait for Python's lock.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from vllm.entrypoints.chat_utils import parse_chat_messages
from vllm.exceptions import VLLMValidationError
from vllm.inputs import tokens_input
from vllm.renderers import hf
from vllm.renderers.base import BaseRenderer
from vllm.renderers.hf import HfRenderer, resolve_chat_template_content_format
from vllm.renderers.params import TokenizeParams

from seamless_verl.gateway.api_errors import Overflow
from seamless_verl.gateway.chat_messages import (
    developer_to_system,
    has_developer,
    has_parts,
    order_tool_results,
    parts_as_text,
    with_joined_texts,
    with_listed_contents,
)
from seamless_verl.gateway.continuation import Continuation
from seamless_verl.gateway.http import COUNT_TOKENS_PATH
from seamless_verl.gateway.images import IMAGE, digests_in, with_parts
from seamless_verl.gateway.prefix_index import PrefixMatch, prefix_seed, text_only
from seamless_verl.gateway.request_context import CURRENT, Rendered, RequestContext
from seamless_verl.gateway.request_rules import OUTPUT_LIMITS
from seamless_verl.gateway.serving import shows_later_system
from seamless_verl.platform.vllm_versions import chat_renderer
from seamless_verl.runtime.prompt_cache import PromptCache, prompt_key
from seamless_verl.trajectory.images import PromptImage
from seamless_verl.trajectory.records import tokens

REUSED: ContextVar[list[int] | None] = ContextVar("reused prompt", default=None)
INLINE_CHARACTERS = 4096  # the longest text that is rendered in the event loop's thread: a millisecond's work
MAX_TEMPLATES = 8  # of which it is kept what they do with a later system message
NOT_TEMPLATE_SETTINGS = ("add_generation_prompt", "continue_final_message", "tools", "tokenize", "documents")
WHOLE_PROMPT_FIELDS = (
    *("truncate_prompt_tokens", "return_assistant_tokens_mask", "return_token_offsets", "chat_template"),
)
"""Request fields that need the whole conversation rendered."""
PROMPT_FIELDS = ("add_special_tokens", "tool_choice", "response_format")
"""Request fields that shape the prompt, besides the conversation, its tools and the template's settings."""
PROMPT_TEXT_FIELDS = ("echo", "return_prompt_text")  # Request fields that need the prompt's text, not only its ids


def is_short(value: Any) -> bool:
    """Whether all text in a JSON value is short enough to be rendered inline."""
    return _remaining(value, INLINE_CHARACTERS) >= 0


def _remaining(value: Any, limit: int) -> int:
    """The limit, in characters, less the text in the value; below 0 when the text is longer."""
    if isinstance(value, str):
        return limit - len(value)
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return limit
    for part in value:
        limit = _remaining(part, limit - 1)
        if limit < 0:
            break
    return limit


def tokenize_inline(renderer: BaseRenderer) -> None:
    """Makes a renderer do short work in the calling thread."""
    tokenize = renderer._tokenize_prompt
    renderer._tokenize_prompt_async = _inline_when_short(tokenize, renderer._tokenize_prompt_async)
    if isinstance(renderer, hf.HfRenderer):
        template = hf.safe_apply_chat_template
        renderer._apply_chat_template_async = _inline_when_short(template, renderer._apply_chat_template_async)


def leave_length_to_us(renderer: BaseRenderer, limit: int) -> None:
    """Makes a renderer tokenize prompts of any length: a reply gets the room that its prompt leaves.

    vLLM's would leave room for as many tokens as were asked for. `check_length` refuses a prompt that leaves none, with
    its length, which clients of the real services read.
    """
    tokenize, render = renderer.tokenize_prompts_async, renderer.render_cmpl_async

    async def run(prompts: Any, params: TokenizeParams) -> Any:
        if params.truncate_prompt_tokens is None:
            params = replace(params, max_total_tokens=None, max_output_tokens=0)
        elif params.max_input_tokens == 0:
            params = replace(params, max_output_tokens=1)
        return await tokenize(prompts, params)

    async def run_completion(*args: Any, **options: Any) -> Any:  # checked here, for it has no chat
        rendered = await render(*args, **options)
        for prompt in rendered:
            check_length(prompt.get("prompt_token_ids"), limit)
        return rendered

    renderer.tokenize_prompts_async, renderer.render_cmpl_async = run, run_completion


def check_length(ids: Sequence[int] | None, limit: int) -> None:
    """Raises VLLMValidationError when a prompt leaves no room for a reply; the request's context then says how much."""
    context = CURRENT.get()
    if ids is None or len(ids) < limit or context is None or context.path == COUNT_TOKENS_PATH:
        return
    asked = next((value for name in OUTPUT_LIMITS if isinstance(value := context.parameters.get(name), int)), 1)
    context.overflow = Overflow(len(ids), limit, max(asked, 1))
    raise VLLMValidationError(context.overflow.message, parameter="messages", value=len(ids))


def reuse_ids(renderer: BaseRenderer) -> None:
    """Makes a renderer take the ids of `REUSED`, where there are any, for the prompt, and render nothing."""
    render = renderer.render_chat_async

    async def run(*args: Any, prompt_extras: Mapping[str, Any] | None = None, **options: Any) -> Any:
        if (ids := REUSED.get()) is None:
            return await render(*args, prompt_extras=prompt_extras, **options)
        return [[]], [tokens_input(ids, cache_salt=(prompt_extras or {}).get("cache_salt"))]

    renderer.render_chat_async = run


def _inline_when_short(
    inline: Callable[..., Any], threaded: Callable[..., Awaitable[Any]]
) -> Callable[..., Awaitable[Any]]:
    async def run(*args: Any, **options: Any) -> Any:
        if is_short(args) and is_short(options):
            return inline(*args, **options)
        return await threaded(*args, **options)

    return run


class SessionRenderer(chat_renderer()):  # type: ignore[misc]
    """Renders the recorded prefix of a conversation as its recorded ids, and the rest by the chat template."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        tokenize_inline(self.renderer)
        reuse_ids(self.renderer)
        leave_length_to_us(self.renderer, self.model_config.max_model_len)
        self._prompts = PromptCache()
        self._takes_developer_as_system = lru_cache(MAX_TEMPLATES)(self._find_developer_as_system)
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
        _check_messages(messages)
        content_format, tools = default_template_content_format, tool_dicts
        messages = self._in_one_form(request, with_listed_contents(messages), tools, content_format)
        context = CURRENT.get()
        recorded, digests = with_parts(messages), digests_in(messages)
        if digests and context is not None:
            messages = await asyncio.to_thread(with_parts, messages, context.images)
        ids = key = None
        if context is not None:
            params = request.build_chat_params(default_template, content_format)
            settings = params.with_defaults(default_template_kwargs).chat_template_kwargs
            context.rendered = _rendered(request, recorded, tools, parser, settings)
            ids = await self._continue_recorded(context, messages, settings, content_format)
            if ids is None and (key := _cache_key(context.rendered, settings)) is not None:
                cached = self._prompts.get(key)
                ids = None if cached is None else cached.tolist()
        reused = REUSED.set(ids)
        try:
            given = (default_template, content_format, default_template_kwargs, tools, parser)
            result: tuple[list[Any], list[Any]] = await super().preprocess_chat(request, messages, *given, **options)
        finally:
            REUSED.reset(reused)
        prompt_ids = result[1][0].get("prompt_token_ids")
        check_length(prompt_ids, self.model_config.max_model_len)
        if ids is not None:
            assert prompt_ids is ids, "a prompt that is on record was rendered again"
        elif key is not None:
            self._prompts.put(key, tokens(prompt_ids))
        elif digests and context is not None and context.rendered is not None:
            context.rendered = replace(context.rendered, images=placed_images(result[1][0], digests))
            result[1][0] = tokens_input(prompt_ids)  # engines make of the images what the model reads
        return result

    def _in_one_form(
        self, request: Any, messages: list[Any], tools: list[dict[str, Any]] | None, content_format: Any
    ) -> list[Any]:
        """The messages as they are matched and recorded, whichever way the agent has of writing them.

        A developer's message is a system message where the template has no such role. vLLM says so, too, but then puts
        all system messages into the first one: what was said before would begin differently, and fork.
        """
        messages = order_tool_results(messages)
        own_template = getattr(request, "chat_template", None)
        if self._continuation is None or own_template is not None:  # some tokenizers read the parts by their types
            return messages
        messages = parts_as_text(messages)
        if has_parts(messages) and self._content_format(tools, content_format) == "string":
            messages = with_joined_texts(messages)
        if not has_developer(messages):
            return messages
        given = {"chat_template": self.chat_template, "tools": tools, "model_config": self.model_config}
        template = hf.resolve_chat_template(self.renderer.get_tokenizer(), **given)
        return developer_to_system(messages) if self._takes_developer_as_system(template) else messages

    def _find_developer_as_system(self, template: str | None) -> bool:
        if template is None or any(quoted in template for quoted in ("'developer'", '"developer"')):
            return False
        return shows_later_system(self.renderer.get_tokenizer(), template)

    async def _continue_recorded(
        self, context: RequestContext, messages: Sequence[Any], settings: Mapping[str, Any], content_format: Any
    ) -> list[int] | None:
        """The prompt's ids when its beginning is on record, else None; `messages` are those for vLLM."""
        rendered = context.rendered
        assert rendered is not None
        if self._continuation is None or not _only_appends(rendered.request, settings):
            return None
        match = context.session.prefixes.find_longest(rendered.seed, rendered.messages)
        covered = match.count if match is not None else 0
        extended = context.session.prefixes.find_extended(rendered.seed, rendered.messages, covered)
        if extended is not None:
            rejoin = partial(self._continuation.rejoin, extended)
            match = (rejoin() if is_short(extended.sent) else await asyncio.to_thread(rejoin)) or match
        if match is None:
            return None
        extended = await self._extend(self._continuation, rendered, messages, match, content_format)
        if extended is None:
            return None
        ids, images = extended
        asked = getattr(rendered.request, "max_output_tokens", None) or 1
        if _truncates(rendered.request) and len(ids) + asked > self.model_config.max_model_len:
            return None  # vLLM cuts it
        context.rendered = replace(rendered, match=match, images=images)
        return ids

    async def _extend(
        self,
        continuation: Continuation,
        rendered: Rendered,
        messages: Sequence[Any],
        match: PrefixMatch,
        content_format: Any,
    ) -> tuple[list[int], tuple[PromptImage, ...]] | None:
        content_format = self._content_format(rendered.tools, content_format)
        given = [_plain(message) for message in messages]
        parsed, pictures, digests = parse_chat_messages(given, self.model_config, content_format=content_format)
        conversation = list(parsed)
        if len(conversation) != len(rendered.messages):
            return None
        recorded, settings = match.prefix.ids(), rendered.settings
        recorded.extend(match.rest)
        extend = partial(continuation.extend, recorded, conversation, match.count, rendered.tools, settings)
        new_messages = conversation[match.count :]
        short = is_short(new_messages) and is_short(rendered.tools)
        ids = extend() if short else await asyncio.to_thread(extend)  # a long tool result takes long to tokenize
        if ids is None or not pictures:
            return None if ids is None else (ids, ())
        return await self._with_placeholders(ids, recorded, pictures, digests or {})

    async def _with_placeholders(
        self, ids: list[int], recorded: array[int], pictures: Any, digests: Mapping[str, Any]
    ) -> tuple[list[int], tuple[PromptImage, ...]] | None:
        """The ids with as many placeholders as each picture has tokens; None if these are not the recorded ones.

        As an engine does with the ids that it gets: the recorded prompt has them already, new messages have one each.
        """
        token = getattr(self.renderer.get_mm_processor().info.get_hf_processor(), "image_token_id", None)
        once = [one for place, one in enumerate(ids) if one != token or not place or ids[place - 1] != token]
        prompt: Any = {"prompt_token_ids": once, "multi_modal_data": pictures, "multi_modal_uuids": digests}
        made = await self.renderer.process_for_engine_async(prompt, time.time())
        whole = made["prompt_token_ids"]
        if whole[: len(recorded)] != recorded.tolist():
            return None
        return whole, placed_images(made, digests[IMAGE])

    def _content_format(self, tools: list[dict[str, Any]] | None, given: Any) -> Any:
        """Whether the template takes contents as one text, "string", or as a list of parts, "openai"."""
        return resolve_chat_template_content_format(
            chat_template=self.chat_template,
            tools=tools,
            given_format=given,
            tokenizer=self.renderer.get_tokenizer(),
            model_config=self.model_config,
        )


def placed_images(prompt: Mapping[str, Any], digests: Sequence[str]) -> tuple[PromptImage, ...]:
    """Where vLLM has put the placeholders of these images, which are all of the prompt's, in their order."""
    places = prompt["mm_placeholders"][IMAGE]
    pairs = zip(places, digests, strict=True)
    return tuple(PromptImage(place.offset, place.length, digest) for place, digest in pairs)


def _check_messages(messages: Sequence[Any]) -> None:
    """Raises VLLMValidationError for an item of the Responses API that vLLM does not convert to a message."""
    for message in messages:
        if isinstance(message, Mapping) and not isinstance(message.get("role"), str):
            kind = message.get("type")
            raise VLLMValidationError(f"an item of type {kind!r} is no message, call or result of a call; leave it out")


def _rendered(request: Any, messages: list[Any], tools: Any, parser: Any, settings: Mapping[str, Any]) -> Rendered:
    template_settings = {
        name: value for name, value in settings.items() if name not in NOT_TEMPLATE_SETTINGS and value is not None
    }
    plain = [_plain(message) for message in messages]
    return Rendered(request, plain, tools, parser, template_settings, prefix_seed(tools, template_settings))


def _only_appends(request: Any, settings: Mapping[str, Any]) -> bool:
    """Whether the prompt is the conversation and the beginning of a reply, no more and no less."""
    fields = vars(request)  # getattr is slow for a field that a model lacks
    if settings.get("documents") or any(fields.get(name) for name in WHOLE_PROMPT_FIELDS):
        return False
    return bool(settings.get("add_generation_prompt")) and not settings.get("continue_final_message")


def _truncates(request: Any) -> bool:
    """Whether vLLM cuts off the beginning of a prompt that is too long, which it can of one that it rendered whole."""
    return vars(request).get("truncation", "disabled") not in (None, "disabled")


def _cache_key(rendered: Rendered, settings: Mapping[str, Any]) -> bytes | None:
    """Equal for requests with the same prompt; None when the request holds more than text, or needs more than ids."""
    fields = vars(rendered.request)
    if (
        any(fields.get(name) for name in PROMPT_TEXT_FIELDS)
        or _truncates(rendered.request)
        or not text_only(rendered.messages)
        or not _only_appends(rendered.request, settings)
    ):
        return None
    return prompt_key(rendered.tools, settings, [fields.get(name) for name in PROMPT_FIELDS], rendered.messages)


def _plain(message: Any) -> dict[str, Any]:
    """A message as plain JSON values: the Responses API leaves objects of its SDK in contents."""
    plain = dict(message)
    content = plain.get("content")
    if isinstance(content, list):
        plain["content"] = [part.model_dump() if hasattr(part, "model_dump") else part for part in content]
    return plain
