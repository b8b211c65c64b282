"""One running call of an agent's request: its tokens reach the record, then the agent, and at the end become a message.

Invariants:
- The recorder gets start_call, chunks and one end_call, in this order; nothing of a call that was cancelled before its
  first step, for Python does not begin such a task.
- A chunk is delivered after it is on record, the last one after the call's end is.
- A request gets the error of each of its calls that failed, also of one that never began.
- When the request is gone the call is cancelled, unless a retry of the request reads its output.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

from vllm.outputs import RequestOutput
from vllm.v1.engine.exceptions import EngineGenerateError

from seamless_verl.errors import JournalError, SeamlessError
from seamless_verl.gateway.calls import CallSource, SessionCall
from seamless_verl.gateway.outputs import Decoder
from seamless_verl.gateway.recorder import JournalRecorder
from seamless_verl.gateway.reply_parser import ParsedReply
from seamless_verl.gateway.request_context import Rendered, RequestContext
from seamless_verl.gateway.retries import CallOutput, do_nothing
from seamless_verl.platform.vllm_versions import GenerationError
from seamless_verl.trajectory.messages import ASSISTANT
from seamless_verl.trajectory.records import TOKEN, Finish, TokenChunk

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class RunningCall:
    """A call with its collaborators."""

    call: SessionCall
    context: RequestContext
    source: CallSource
    recorder: JournalRecorder | None  # None for a call that a retry reads again: all of it is on record
    decoder: Decoder
    output: CallOutput
    deliver: Callable[[RequestOutput | Exception], None]  # takes what to show, or the error that ends the request
    make_parser: Callable[[Rendered], Any]  # of the reply; gives None where the model has no parser
    on_malformed: Callable[[], None]  # a tool call in the reply cannot be read
    recorded: int = 0  # so many of the next tokens were recorded, and counted, before a restart
    request_id: str = ""
    task: asyncio.Task[None] | None = None
    attached: bool = True  # the request that began the call still reads it
    begun: bool = False  # its task has run
    ending: bool = False  # its end is being recorded

    def start(self) -> asyncio.Task[None]:
        self.task = asyncio.create_task(self._run(), name=self.call.call_id)
        self.output.on_last_reader_left = self._cancel_if_unread
        self.task.add_done_callback(self._release)
        return self.task

    def detach(self) -> None:
        """The request that began the call has ended, or is gone."""
        self.attached = False
        self._cancel_if_unread()

    def cancel(self) -> None:
        """Cancels the call, unless it is ending by itself."""
        if not self.ending and self.task is not None:
            self.task.cancel()

    def _cancel_if_unread(self) -> None:
        if not self.attached and not self.output.readers:
            self.cancel()

    def _release(self, _: asyncio.Task[None]) -> None:
        """Ends the request of a call that never ran, and the references in a circle.

        By these an ended call would stay until Python's collector comes: the task has the error that ended it, whose
        traceback has this call.
        """
        if not self.begun:
            self.output.fail()
            self.deliver(GenerationError("the call was cancelled"))
        self.output.on_last_reader_left, self.task = do_nothing, None

    async def _run(self) -> None:
        self.begun = True
        try:
            await self._generate()
        except asyncio.CancelledError:
            await self._fail(GenerationError("the call was cancelled"), Finish.CANCELLED)
            raise
        except Exception as error:  # the call's supervisor: any error goes on record and to the agent
            logger.error("call %s failed: %s", self.call.call_id, error, exc_info=not isinstance(error, SeamlessError))
            with suppress(JournalError):  # of a journal that accepts nothing any more, as the line above says
                await self._fail(EngineGenerateError(f"{type(error).__name__}: {error}"))

    async def _generate(self) -> None:
        recorder = self.recorder
        if recorder is not None:
            await recorder.start_call(self.call)
        async with aclosing(self.source.stream(self.call)) as chunks:
            async for generated in chunks:
                chunk, shown = self.decoder.feed(generated)
                if recorder is not None:
                    new = self._without_recorded(chunk) if self.recorded else chunk
                    if self.decoder.final_only and chunk.finish_reason is None:
                        recorder.buffer_chunk(self.call, new)
                    else:
                        await recorder.record_chunk(self.call, new)
                    self.context.session.tokens += len(new.ids)
                if chunk.finish_reason is not None:
                    self.call.reading.ended = True
                    await self._finish(chunk, chunk.finish_reason, shown)
                    return
                self._publish(chunk, shown)
        raise RuntimeError("the call's source ended without a finish reason")

    def _without_recorded(self, chunk: TokenChunk) -> TokenChunk:
        """A chunk without its tokens that are on record: all of them, or none."""
        old = min(self.recorded, len(chunk.ids))
        self.recorded -= old
        assert old in (0, len(chunk.ids)), "a chunk is partly on record"
        return chunk.without_tokens() if old else chunk

    async def _finish(self, chunk: TokenChunk, finish: Finish, shown: RequestOutput | None) -> None:
        if finish not in (Finish.STOP, Finish.LENGTH):
            await self._fail(GenerationError(str(chunk.error or "the call failed")), finish)
            return
        self.ending = True
        await self._record_end(*self._reply(finish))
        self._publish(chunk, shown)

    def _publish(self, chunk: TokenChunk, shown: RequestOutput | None) -> None:
        self.output.add(chunk)
        if shown is not None:
            self.deliver(shown)

    async def _fail(self, error: Exception, finish: Finish = Finish.FAILED) -> None:
        try:
            text = self.decoder.text
            await self._record_end(finish, {"text": text} if text else {})
        finally:
            self.deliver(error)

    async def _record_end(self, finish: Finish, reply: dict[str, Any]) -> None:
        self.ending = True
        if finish in (Finish.CANCELLED, Finish.FAILED):
            self.output.fail()
        if self.recorder is not None:
            await self.recorder.end_call(self.call, finish, reply)

    def _reply(self, finish: Finish) -> tuple[Finish, dict[str, Any]]:
        """How the call ended, and its reply, whose ids are kept for the conversation's next turn."""
        rendered, decoder = self.context.rendered, self.decoder
        if rendered is None:
            return finish, {"text": decoder.text}
        message, malformed = _message(rendered, self.make_parser(rendered), decoder)
        if self.recorder is not None:
            if malformed is not None:
                text = " ".join(malformed.split())[:200]
                logger.warning("call %s: a tool call cannot be read and is given as text: %s", self.call.call_id, text)
                self.on_malformed()
            generated, prefixes = array(TOKEN, decoder.ids), self.context.session.prefixes
            prefixes.add(rendered.seed, rendered.messages, message, self.call.prompt_ids, generated, rendered.match)
        called_tools = finish is Finish.STOP and message.get("tool_calls")
        return Finish.TOOL_CALLS if called_tools else finish, {"message": message}


def _message(rendered: Rendered, parser: Any, decoder: Decoder) -> tuple[dict[str, Any], str | None]:
    """The reply as the message that the agent would send back, and why its tool calls cannot be read, if so."""
    message: dict[str, Any] = {"role": ASSISTANT, "content": decoder.text}
    if parser is None:
        return message, None
    reply: ParsedReply = parser.parse_reply(decoder.text, rendered.request, decoder.ids)
    message["content"] = reply.content
    if reply.reasoning:
        message["reasoning"] = reply.reasoning
    if reply.calls:
        functions = [{"name": call.name, "arguments": call.arguments} for call in reply.calls]
        message["tool_calls"] = [{"type": "function", "function": function} for function in functions]
    return message, reply.malformed
