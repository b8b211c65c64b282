"""Changes to vLLM's serving classes, so that their replies are what clients of the real services expect."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from functools import wraps
from typing import Any, Literal

from jinja2 import TemplateError
from pydantic import BaseModel
from vllm.entrypoints.anthropic.protocol import AnthropicContentBlock
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionNamedToolChoiceParam,
    ChatCompletionResponse,
)
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.openai.responses.protocol import ResponsesResponse

from seamless_verl.gateway.request_context import CURRENT, RequestContext, current_request
from seamless_verl.gateway.stored_responses import ItemIds, StoredResponse, referenced_id

DATA = "data: "
TEXTS = ("content", "reasoning", "reasoning_content")
TOKEN_FIELDS = ("logprobs", "token_ids")  # of a choice: what belongs to its tokens
EMPTY_TEXT: dict[str, Any] = {"type": "text", "text": ""}
FIRST_SYSTEM, LATER_SYSTEM = "the first system message", "the later system message"


def accept_any_model(models: OpenAIServingModels) -> None:
    """Makes the list of models accept every name, and replies give back the name that was asked for."""
    served = models.model_name

    def asked_name(lora_request: Any = None) -> str:
        context = CURRENT.get()
        name = None if context is None else context.body.get("model")
        return name if isinstance(name, str) and name else str(served(lora_request))

    for registry in (models, models.registry):
        registry.is_base_model = lambda model_name: True
        registry.model_name = asked_name


def conform_chat(serving: Any) -> None:
    """Sets the finish reason of a whole reply by the calls in it, as in a stream; a stream has parts of calls alone."""
    generate, generate_stream = serving.chat_completion_full_generator, serving.chat_completion_stream_generator

    @wraps(generate)
    async def run(request: Any, *args: Any, **kwargs: Any) -> Any:
        response = await generate(request, *args, **kwargs)
        if isinstance(response, ChatCompletionResponse):
            named = isinstance(request.tool_choice, ChatCompletionNamedToolChoiceParam)
            for choice in response.choices:
                if choice.message.tool_calls and not named:
                    choice.finish_reason = "tool_calls"
                elif choice.finish_reason == "tool_calls":
                    choice.finish_reason = "stop"
        return response

    @wraps(generate_stream)
    async def run_stream(*args: Any, **kwargs: Any) -> AsyncGenerator[str, None]:
        async with aclosing(generate_stream(*args, **kwargs)) as events:
            async for event in events:
                for part in text_before_calls(event):
                    yield part

    serving.chat_completion_full_generator, serving.chat_completion_stream_generator = run, run_stream


def text_before_calls(event: str) -> list[str]:
    """An event of a streamed chat; as two where it has text, or thoughts, beside calls of tools.

    Clients look for one or the other in a part: AutoGen's leaves out calls beside text.
    """
    if '"tool_calls":[{' not in event or not event.startswith(DATA):
        return [event]
    chunk = json.loads(event.removeprefix(DATA))
    if not any(choice["delta"].get(name) for choice in chunk["choices"] for name in TEXTS):
        return [event]
    first = {**chunk, "choices": []}
    first.pop("usage", None)  # counts up to the end, which the calls' part has
    for choice in chunk["choices"]:
        delta = choice["delta"]
        parts = {name: delta.pop(name) for name in [*delta] if name != "tool_calls"}
        of_text = {name: choice.pop(name) for name in TOKEN_FIELDS if name in choice}
        first["choices"].append({"index": choice["index"], "delta": parts, "finish_reason": None, **of_text})
    return [f"{DATA}{json.dumps(part, ensure_ascii=False, separators=(',', ':'))}\n\n" for part in (first, chunk)]


def conform_messages(serving: Any) -> None:
    """Gives Anthropic's replies ids of messages, the stop reason of a tool call, and a block where they are empty."""
    convert, convert_stream = serving.messages_full_converter, serving.message_stream_converter

    @wraps(convert)
    def run(generator: Any) -> Any:
        result = convert(generator)
        result.id = _message_id(result.id)
        if not result.content:  # vLLM 0.24 leaves it empty
            result.content = [AnthropicContentBlock(**EMPTY_TEXT)]
        if any(block.type == "tool_use" for block in result.content):
            result.stop_reason = "tool_use"
        return result

    serving.messages_full_converter = run
    serving.message_stream_converter = wraps(convert_stream)(lambda it: _conforming_events(convert_stream(it)))


def place_system_messages(serving: Any, tokenizer: Any, chat_template: str | None) -> None:
    """Leaves Anthropic's system messages within a conversation where they are, if the chat template shows them there.

    Claude Code adds some while it works. vLLM puts them all into the first one unless `--chat-template` is given: what
    came before would then begin differently in each call, and the conversation would fork.
    """
    serving._merge_inline_system = not shows_later_system(tokenizer, chat_template)


def shows_later_system(tokenizer: Any, chat_template: str | None) -> bool:
    """Whether the template, the tokenizer's own where it is None, renders a system message after a user's in its place.

    Some templates raise an error there, others leave it out.
    """
    roles = [("system", FIRST_SYSTEM), ("user", "u"), ("system", LATER_SYSTEM), ("user", "v")]
    messages = [{"role": role, "content": text} for role, text in roles]
    own = {} if chat_template is None else {"chat_template": chat_template}
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, **own))
    except (TemplateError, ValueError):  # the template refuses it, or the tokenizer has none
        return False
    return -1 < text.find(FIRST_SYSTEM) < text.find(LATER_SYSTEM) and text.count(LATER_SYSTEM) == 1


async def _conforming_events(events: AsyncIterator[str]) -> AsyncGenerator[str, None]:
    """The events of a streamed message, of which the first and the last but one are changed."""
    blocks = calls = 0
    async for event in events:
        name, _, data = event.partition("\ndata: ")
        if name == "event: content_block_start":
            blocks += 1
            calls += '"tool_use"' in data
        elif name == "event: message_start":
            started = json.loads(data)
            started["message"]["id"] = _message_id(started["message"]["id"])
            event = _event("message_start", started)
        elif name == "event: message_delta":
            if not blocks:
                yield _event("content_block_start", {"index": 0, "content_block": EMPTY_TEXT})
                yield _event("content_block_stop", {"index": 0})
            if calls:
                delta = json.loads(data)
                delta["delta"]["stop_reason"] = "tool_use"
                event = _event("message_delta", delta)
        yield event


def _event(name: str, fields: dict[str, Any]) -> str:
    return f"event: {name}\ndata: {json.dumps({'type': name, **fields}, ensure_ascii=False)}\n\n"


def _message_id(name: str) -> str:
    return f"msg_{name.removeprefix('chatcmpl-')}"


class IncompleteEvent(BaseModel):
    """The last event of a stream that its budget of tokens cut."""

    type: Literal["response.incomplete"] = "response.incomplete"
    sequence_number: int
    response: ResponsesResponse


def conform_responses(serving: Any, max_stored: int) -> None:
    """Stores responses in their session, at most `max_stored`, and continues them; makes streams end as they went."""
    create = serving.create_responses

    @wraps(create)
    async def run(request: Any, raw_request: Any = None) -> Any:
        context = current_request()
        request.request_id = context.attempt.reply_name
        conversation = _Conversation(context, request, max_stored)
        conversation.begin()
        result = await create(request, raw_request)
        if isinstance(result, ResponsesResponse):
            conversation.end(result)
        return conversation.stream(result) if isinstance(result, AsyncGenerator) else result

    serving.create_responses = run


class _Conversation:
    """One request of the Responses API, with the response that it continues, if any."""

    def __init__(self, context: RequestContext, request: Any, max_stored: int) -> None:
        self._responses, self._request, self._max_stored = context.session.responses, request, max_stored
        self._previous_id, self._previous = request.previous_response_id, context.previous
        self._referenced, self._ids = context.referenced, ItemIds(request.request_id)
        self._store = request.store is not False
        if self._store:
            context.response_id = request.request_id

    def begin(self) -> None:
        """Puts stored items in the place of those that name them, and those of the conversation so far before them."""
        own = self._request.input
        items = [{"role": "user", "content": own}] if isinstance(own, str) else list(own)
        if self._referenced:
            names = map(referenced_id, items)
            items = [self._referenced[name] if name else item for name, item in zip(names, items, strict=True)]
            self._request.input = items
        if self._previous is not None:
            self._request.input = items = [*self._previous.items, *items]
            self._request.previous_response_id = None
        self._items = list(items)

    def end(self, response: ResponsesResponse) -> None:
        """The response as the client gets it, stored unless the request has `store: false`."""
        response.previous_response_id = self._previous_id
        for item in response.output:
            self._ids.assign(item)
        if self._store:
            body = response.model_dump(mode="json", by_alias=True)
            stored = StoredResponse(body, [*self._items, *response.output])
            self._responses.put(response.id, stored, self._max_stored)

    async def stream(self, events: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
        items = []
        async for event in events:
            kind = getattr(event, "type", "")
            if (item := getattr(event, "item", None)) is not None:
                self._ids.assign(item)
            if (name := getattr(event, "item_id", None)) is not None:
                event.item_id = self._ids.assigned(name)
            if kind == "response.output_item.done":
                items.append(event.item)
            elif kind in ("response.created", "response.in_progress"):
                _set(event.response, "previous_response_id", self._previous_id)
            elif kind == "response.completed":
                response = event.response
                response.output = items
                self.end(response)
                if response.status == "incomplete":
                    event = IncompleteEvent(sequence_number=event.sequence_number, response=response)
            yield event


def _set(response: Any, name: str, value: Any) -> None:
    if isinstance(response, dict):
        response[name] = value
    else:
        setattr(response, name, value)
