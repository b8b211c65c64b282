"""What a call's tokens say, as the message an agent would send back."""

from __future__ import annotations

from array import array
from typing import Any

from seamless_verl.gateway.exchange import Exchange
from seamless_verl.gateway.outputs import Decoder
from seamless_verl.gateway.seam import SessionCall
from seamless_verl.trajectory.messages import ASSISTANT
from seamless_verl.trajectory.records import TOKEN, Finish


def settle(
    exchange: Exchange,
    tokenizer: Any,
    model_config: Any,
    call: SessionCall,
    decoder: Decoder,
    finish: Finish,
    *,
    fresh: bool,
) -> tuple[Finish, dict[str, Any]]:
    """How the call ended and its reply; a `fresh` one is remembered for the conversation's next turn."""
    rendered = exchange.rendered
    if rendered is None:
        return finish, {"text": decoder.text}
    message = _message(exchange, tokenizer, model_config, decoder)
    if fresh:
        generated = array(TOKEN, decoder.ids)
        exchange.session.memory.add(
            rendered.seed, rendered.messages, message, call.prompt_ids, generated, rendered.known
        )
    called = finish is Finish.STOP and message.get("tool_calls")
    return Finish.TOOL_CALLS if called else finish, {"message": message}


def _message(exchange: Exchange, tokenizer: Any, model_config: Any, decoder: Decoder) -> dict[str, Any]:
    rendered = exchange.rendered
    assert rendered is not None
    message: dict[str, Any] = {"role": ASSISTANT, "content": decoder.text}
    if rendered.parser is None:
        return message
    parser = rendered.parser(
        tokenizer, rendered.request.tools, chat_template_kwargs=dict(rendered.settings), model_config=model_config
    )
    reasoning, content, calls = parser.parse(
        decoder.text, rendered.request, enable_auto_tools=True, model_output_token_ids=decoder.ids
    )
    message["content"] = content
    if reasoning:
        message["reasoning"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"type": "function", "function": {"name": one.name, "arguments": one.arguments}} for one in calls
        ]
    return message
