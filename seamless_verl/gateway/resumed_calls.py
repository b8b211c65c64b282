"""Resumes a call that a restart interrupted: first the tokens on record, then newly generated ones.

The continuation begins when the retry asks for it, not at the restart. Stop strings, reply parsers and the form of
the reply belong to the request, which only the retry brings; and an agent that died with the gateway never retries,
so nothing is generated for nobody. The retry waits for the missing tokens, as it would have done in any case.

Invariant: tokens on record are shown again, but neither recorded nor counted again.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from seamless_verl.gateway.protocols import CallSource, NullRecorder, Recorder, SessionCall
from seamless_verl.gateway.session import Session
from seamless_verl.journal import StoredCall
from seamless_verl.trajectory.records import Finish, Segment, TokenChunk, logprobs, tokens

GATEWAY_KEY = "gateway"
"""The key of a stored request under which the gateway keeps what it needs to find its call again."""

# An engine reports STOP for tool calls: they are parsed from the text, again when it is read again.
ENGINE_FINISH = {Finish.STOP: Finish.STOP, Finish.TOOL_CALLS: Finish.STOP, Finish.LENGTH: Finish.LENGTH}


def count_recorded(call: StoredCall) -> int:
    """Generated tokens on record."""
    return sum(len(segment) for segment in call.segments)


def resume_call(call: SessionCall, stored: StoredCall) -> SessionCall:
    """The call of a retry, with the id, the prompt, the request and the token budget of the stored call."""
    budget = stored.request.get(GATEWAY_KEY, {}).get("max_tokens", call.sampling["max_tokens"])
    return replace(
        call,
        call_id=stored.call_id,
        prompt_ids=stored.prompt_ids,
        sampling={**call.sampling, "max_tokens": budget},
        request=stored.request,
    )


@dataclass(frozen=True)
class ResumedSource:
    """A CallSource for one call: its recorded tokens, then those of `source`."""

    segments: Sequence[Segment]
    source: CallSource

    async def stream(self, call: SessionCall) -> AsyncGenerator[TokenChunk, None]:
        ids = tokens(())
        for segment in self.segments:
            ids.extend(segment.ids)
            yield segment.chunk()
        async with aclosing(self.source.stream(replace(call, produced=ids))) as chunks:
            async for chunk in chunks:
                yield chunk


class RecordedOffset:
    """Counts down the tokens of a call that were recorded before the restart."""

    def __init__(self, recorded: int) -> None:
        self._remaining = recorded

    def count_new(self, number: int) -> int:
        """How many of the next `number` tokens are new: all or none of a chunk."""
        old = min(self._remaining, number)
        self._remaining -= old
        assert old in (0, number), "a chunk is partly on record"
        return number - old


class ResumedRecorder(NullRecorder):
    """A recorder for one call whose start and first `recorded` tokens are on record."""

    def __init__(self, recorder: Recorder, recorded: int) -> None:
        self._recorder, self._offset = recorder, RecordedOffset(recorded)

    def buffer_chunk(self, call: SessionCall, chunk: TokenChunk) -> None:
        self._recorder.buffer_chunk(call, self._without_recorded(chunk))

    async def record_chunk(self, call: SessionCall, chunk: TokenChunk) -> None:
        await self._recorder.record_chunk(call, self._without_recorded(chunk))

    async def end_call(self, call: SessionCall, finish: Finish, reply: dict[str, Any]) -> None:
        await self._recorder.end_call(call, finish, reply)

    def _without_recorded(self, chunk: TokenChunk) -> TokenChunk:
        if chunk.ids and not self._offset.count_new(len(chunk.ids)):
            return replace(chunk, ids=tokens(()), logprobs=logprobs(()), top=None, grammar=b"")
        return chunk


def new_token_counter(session: Session, recorded: int) -> Callable[[int], None]:
    """Counts a call's tokens in its session, except the first `recorded`, which were counted before the restart."""
    offset = RecordedOffset(recorded)
    return lambda number: session.add_tokens(offset.count_new(number))
