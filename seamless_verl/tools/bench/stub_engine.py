"""An engine without a model, for tests and for measuring the overhead around an engine; never for serving.

Its next token is a function of all tokens before it, so that a generation cut anywhere and continued anywhere
must equal the uninterrupted one. A token's logprob encodes its weight version and its position.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from seamless_verl.errors import ReplicaLostError
from seamless_verl.rollout.engine import EngineRequest, PauseMode
from seamless_verl.trajectory.records import Finish, TokenChunk, logprobs, merge_chunks, tokens

VOCABULARY, PRIME = 50_000, (1 << 61) - 1


def fold(ids: Sequence[int], start: int = 7) -> int:
    """A hash of a sequence of tokens, which continues from `start`."""
    for token in ids:
        start = (start * 1_000_003 + token + 1) % PRIME
    return start


def stub_tokens(prompt: Sequence[int], number: int, vocabulary: int = VOCABULARY) -> list[int]:
    """The uninterrupted generation."""
    state, produced = fold(prompt), []
    for _ in range(number):
        produced.append(state % vocabulary)
        state = fold(produced[-1:], state)
    return produced


def stub_logprob(version: int, position: int) -> float:
    """Exact in float32 for versions below 2^13; position counts prompt and generated tokens."""
    return -(version + (position % 1024) / 1024)


class StubEngine:
    """An engine and its control in one.

    Args:
        replica_id: its name.
        version: of its weights; set `version` to change it, as a sync would.
        tokens_per_chunk: tokens in each chunk, more than 1 as with speculative decoding.
        tail: tokens that a CUT brings along.
        delay_s: seconds between chunks; 0 only yields to other tasks.
        vocabulary: its tokens are below this number, for a small tokenizer.
    """

    def __init__(
        self,
        replica_id: str,
        *,
        version: int = 0,
        tokens_per_chunk: int = 1,
        tail: int = 0,
        delay_s: float = 0.0,
        vocabulary: int = VOCABULARY,
    ) -> None:
        self.replica_id, self.version, self.tokens_per_chunk = replica_id, version, tokens_per_chunk
        self.tail, self.delay_s, self.vocabulary = tail, delay_s, vocabulary
        self.seen: list[EngineRequest] = []
        self.produced = 0  # tokens
        self._running: dict[str, _Generation] = {}
        self._cuts: dict[str, TokenChunk] = {}  # the last chunks of requests that were cut, made when they were
        self._pause: PauseMode | None = None
        self._dead: str | None = None
        self._changed = asyncio.Event()

    @property
    def running(self) -> int:
        """Requests that have neither ended nor been closed."""
        return len(self._running)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenChunk, None]:
        self._check_alive()
        name, generation = request.request_id, _Generation(self.replica_id, request, self.vocabulary)
        assert name not in self._running, f"{name} runs already"
        self.seen.append(request)
        self._running[name] = generation
        if self._pause is PauseMode.ABORT:
            self._cut(name, 0)
        try:
            finish: Finish | None = None
            due = asyncio.get_running_loop().time()
            interval = _StreamInterval(request.sampling.get("stream_interval", 1))
            while finish is None:
                due = await self._turn(name, due + self.delay_s)
                chunk = self._cuts.pop(name, None) or generation.next(self.tokens_per_chunk, self.version)
                finish = chunk.finish_reason
                self.produced += len(chunk.ids)
                for merged in interval.put(chunk):
                    yield merged
        finally:
            del self._running[name]
            self._cuts.pop(name, None)

    async def abort(self, request_id: str) -> None:
        if request_id in self._running:
            self._cut(request_id, self.tail)

    def close(self) -> None:
        self.kill("closed")

    async def pause(self, mode: PauseMode) -> None:
        self._check_alive()
        self._pause = mode
        if mode is PauseMode.ABORT:
            await self.abort_all()

    async def resume(self) -> None:
        self._check_alive()
        self._pause = None
        self._wake()

    async def abort_all(self) -> None:
        self._check_alive()
        self._pause = self._pause and PauseMode.ABORT
        for name in self._running:
            self._cut(name, self.tail)

    async def update_weights(self, version: int, weights: Any) -> None:
        await self.pause(PauseMode.KEEP)
        self.version = version
        await self.resume()

    def kill(self, reason: str = "killed") -> None:
        """Dies at once: every running request raises ReplicaLostError at its next token."""
        self._dead = self._dead or reason
        self._wake()

    def _cut(self, name: str, tail: int) -> None:
        if name not in self._cuts:
            self._cuts[name] = self._running[name].next(tail, self.version, Finish.CUT)
            self._wake()

    async def _turn(self, name: str, due: float) -> float:
        """Waits until the next chunk is due; returns the time from which the one after it is counted.

        A chunk is due after the one before it, whenever that was read: slow readers do not slow an engine.
        """
        clock = asyncio.get_running_loop().time
        await asyncio.sleep(max(0.0, due - clock()))  # the time that a real engine computes
        while self._pause is not None and name not in self._cuts and self._dead is None:
            await self._changed.wait()
            due = clock()
        self._check_alive()
        return due

    def _wake(self) -> None:
        self._changed.set()
        self._changed.clear()

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise ReplicaLostError(self.replica_id, self._dead)


class _StreamInterval:
    """Holds chunks of one request until they have `interval` tokens, as vLLM does, except the first and the last."""

    def __init__(self, interval: int) -> None:
        self._interval, self._chunks, self._begun = interval, list[TokenChunk](), False

    def put(self, chunk: TokenChunk) -> list[TokenChunk]:
        """The chunks that are due now, at most one for each weight version."""
        earlier = self._flush() if self._chunks and self._chunks[0].version != chunk.version else []
        self._chunks.append(chunk)
        count = sum(len(held.ids) for held in self._chunks)
        due = not self._begun or chunk.finish_reason is not None or count >= self._interval
        self._begun = True
        return earlier + self._flush() if due else earlier

    def _flush(self) -> list[TokenChunk]:
        held, self._chunks = self._chunks, []
        return held if len(held) == 1 else [merge_chunks(held)]


class _Generation:
    """The generation of one request."""

    def __init__(self, replica_id: str, request: EngineRequest, vocabulary: int) -> None:
        self._replica_id, self._vocabulary = replica_id, vocabulary
        self._sampling: dict[str, Any] = {"max_tokens": 16, "min_tokens": 0, "stop_token_ids": (), **request.sampling}
        self._state, self._position, self._produced = fold(request.prompt_ids), len(request.prompt_ids), 0

    def next(self, number: int, version: int, finish: Finish | None = None) -> TokenChunk:
        """The next tokens, at most `number`; with the given finish reason unless they end the text."""
        ids, values, ended = tokens(()), logprobs(()), None
        while len(ids) < number and ended is None:
            ids.append(self._state % self._vocabulary)
            values.append(stub_logprob(version, self._position))
            self._state = fold(ids[-1:], self._state)
            self._produced, self._position = self._produced + 1, self._position + 1
            ended = self._finish(ids[-1])
        return TokenChunk(
            ids, values, version, self._replica_id, ended or finish, ids[-1] if ended is Finish.STOP else None
        )

    def _finish(self, token: int) -> Finish | None:
        if token in self._sampling["stop_token_ids"] and self._produced >= self._sampling["min_tokens"]:
            return Finish.STOP
        return Finish.LENGTH if self._produced >= self._sampling["max_tokens"] else None
