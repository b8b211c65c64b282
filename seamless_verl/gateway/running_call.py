"""What a call's tokens say, as the message an agent would send back.

One call of an agent's request as it runs: every piece is on record before anybody sees it.

Invariants:
- started, then pieces (noted where nobody is shown any before the end), then ended reach the recorder in this order,
  each awaited that can be; ended comes once, whatever happens.
- A piece is delivered after it is on record, the last one after the call's end is.
- When the request goes away the call is cancelled, unless a repetition of the request follows it.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from vllm.exceptions import GenerationError
from vllm.outputs import RequestOutput
from vllm.v1.engine.exceptions import EngineGenerateError

from seamless_verl.gateway.outputs import Decoder
from seamless_verl.gateway.protocols import CallSource, Recorder, SessionCall
from seamless_verl.gateway.request_context import RequestContext
from seamless_verl.gateway.retries import CallOutput
from seamless_verl.rollout.call import Piece
from seamless_verl.trajectory.messages import ASSISTANT
from seamless_verl.trajectory.records import TOKEN, Finish


def finish_reply(
    exchange: RequestContext,
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


def _message(exchange: RequestContext, tokenizer: Any, model_config: Any, decoder: Decoder) -> dict[str, Any]:
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


logger = logging.getLogger(__name__)


class FinishReply(Protocol):
    """What is done with a call that ended well, before its last piece is shown; gives its reply and its finish."""

    def __call__(self, call: SessionCall, decoder: Decoder, finish: Finish) -> tuple[Finish, dict[str, Any]]: ...


@dataclass(eq=False)
class RunningCall:
    """A call and all that takes part in it; `deliver` takes what to show, or the error that ends the request."""

    call: SessionCall
    source: CallSource
    recorder: Recorder
    decoder: Decoder
    tape: CallOutput
    deliver: Callable[[RequestOutput | Exception], None]
    settled: FinishReply
    counted: Callable[[int], None]
    request_id: str = ""
    task: asyncio.Task[None] | None = None
    owned: bool = True
    ending: bool = False

    def start(self) -> asyncio.Task[None]:
        self.task = asyncio.create_task(self._run(), name=self.call.call_id)
        self.tape.abandoned = self._left
        return self.task

    def leave(self) -> None:
        """The request it ran for has ended, or is gone."""
        self.owned = False
        self._left()

    def cancel(self) -> None:
        """Ends the call, unless it is ending by itself."""
        if not self.ending and self.task is not None:
            self.task.cancel()

    def _left(self) -> None:
        if not self.owned and not self.tape.followers:
            self.cancel()

    async def _run(self) -> None:
        try:
            await self._generate()
        except asyncio.CancelledError:
            await self._failed(GenerationError("the call was cancelled"), Finish.CANCELLED)
            raise
        except Exception as error:  # the call's supervisor: whatever broke it goes on record and to its agent
            logger.exception("call %s failed", self.call.call_id)
            await self._failed(EngineGenerateError(f"{type(error).__name__}: {error}"))

    async def _generate(self) -> None:
        await self.recorder.started(self.call)
        async with aclosing(self.source.stream(self.call)) as pieces:
            async for given in pieces:
                piece, output = self.decoder.feed(given)
                if self.decoder.whole and piece.finish is None:
                    self.recorder.noted(self.call, piece)
                else:
                    await self.recorder.piece(self.call, piece)
                self.counted(len(piece.ids))
                if piece.finish is not None:
                    await self._end(piece, output)
                    return
                self.tape.add(piece)
                if output is not None:
                    self.deliver(output)
        raise RuntimeError("the call stopped without an end")

    async def _end(self, piece: Piece, output: RequestOutput | None) -> None:
        assert piece.finish is not None
        if piece.finish not in (Finish.STOP, Finish.LENGTH):
            await self._failed(GenerationError(str(piece.error or "the call failed")), piece.finish)
            return
        self.ending = True
        finish, reply = self.settled(self.call, self.decoder, piece.finish)
        await self._ended(finish, reply)
        self.tape.add(piece)
        if output is not None:
            self.deliver(output)

    async def _failed(self, error: Exception, finish: Finish = Finish.FAILED) -> None:
        try:
            await self._ended(finish, self._said())
        finally:
            self.deliver(error)

    async def _ended(self, finish: Finish, reply: dict[str, Any]) -> None:
        self.ending = True
        if finish in (Finish.CANCELLED, Finish.FAILED):
            self.tape.break_off()
        await self.recorder.ended(self.call, finish, reply)

    def _said(self) -> dict[str, Any]:
        text = self.decoder.text
        return {"text": text} if text else {}
