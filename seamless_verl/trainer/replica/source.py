"""vLLM's AsyncLLM as an engine source: requests in, deltas out, each with the version that made it.

Owned state: the weight version, the pause, and the collectors of the requests in flight.
Invariant: the version changes only while the engine is paused, and after every token that it made
before has been handed out under the old one.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from vllm import SamplingParams, TokensPrompt
from vllm.exceptions import VLLMClientError
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import RequestOutputCollector

from seamless_verl.rollout.engine import BESIDE_SAMPLING, Delta, EngineFinish, EngineRequest, PauseMode, TopLogprobs

HANDING_OUT_S = 60.0  # milliseconds, unless a client has stopped reading
FINISHES = {"stop": EngineFinish.STOP, "length": EngineFinish.LENGTH, "abort": EngineFinish.CUT}


class AsyncLLMSource:
    """One engine; `version` is that of the weights it was started with."""

    def __init__(self, engine: AsyncLLM, version: int) -> None:
        self.engine, self.version = engine, version
        self.paused: PauseMode | None = None
        self.collectors: dict[str, RequestOutputCollector] = {}

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Delta, None]:
        """Deltas as the engine makes them; closing the generator aborts the request."""
        if self.paused is PauseMode.ABORT:
            yield ended(self.version, EngineFinish.CUT)
            return
        prompt = TokensPrompt(prompt_token_ids=request.prompt_ids.tolist())
        fields = dict(request.sampling)
        beside = {name: fields.pop(name, None) for name in BESIDE_SAMPLING}
        try:
            collector = await self.engine.add_request(request.request_id, prompt, sampling(fields), **beside)
        except (ValueError, VLLMClientError) as error:
            yield ended(self.version, EngineFinish.ERROR, str(error))
            return
        except asyncio.CancelledError:  # the engine may have it already
            await self.engine.abort(request.request_id)
            raise
        self.collectors[request.request_id] = collector
        finished = False
        try:
            while not finished:
                output = collector.get_nowait() or await collector.get()
                assert isinstance(output, RequestOutput)
                finished = output.finished
                yield self.delta(output, top=bool(request.sampling.get("logprobs")))
        finally:
            del self.collectors[request.request_id]
            collector.close()
            if not finished:
                await self.engine.abort(collector.request_id, internal=True)

    async def abort(self, request_id: str) -> None:
        """End one request with CUT; one that is not running is no error."""
        if (collector := self.collectors.get(request_id)) is not None:
            await self.engine.abort(collector.request_id, internal=True)

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating; with `abort` every request in flight is cut, and so is every later one."""
        self.paused = mode
        await self.engine.pause_generation(mode=mode.value, clear_cache=False)

    async def resume(self) -> None:
        await self.engine.resume_generation()
        self.paused = None

    async def abort_all(self) -> None:
        """Make a `keep` pause an `abort` one."""
        await self.pause(PauseMode.ABORT)

    async def commit(self, version: int) -> None:
        """Say that the engine, paused, holds the weights of `version` now.

        What the old weights left in the KV cache goes: requests in flight compute theirs again at the
        resume, so that each later token has the probability that the new weights alone give it.
        """
        limit = asyncio.get_running_loop().time() + HANDING_OUT_S
        while not self.handed_out():  # a few turns of this loop, in which others hand it out
            if self.engine.errored or asyncio.get_running_loop().time() > limit:
                raise RuntimeError(f"version {version}: tokens of older weights are stuck in the engine, or on the way")
            await asyncio.sleep(0)
        if not await self.engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError(f"version {version}: the engine kept blocks of its KV cache that old weights made")
        self.version = version

    def handed_out(self) -> bool:
        """Whether every token made so far has left its collector: the engine's replies arrive in order,
        so that those made before a pause ended are in this process, between its queue and a collector."""
        if not self.collectors:
            return True
        queue = self.engine.engine_core.outputs_queue
        handled = queue.empty() and bool(queue._getters)  # the handler waits for more
        return handled and all(collector.output is None for collector in self.collectors.values())

    def delta(self, output: RequestOutput, *, top: bool) -> Delta:
        if not output.outputs:
            return ended(self.version, EngineFinish.CUT)
        completion = output.outputs[0]
        ids = list(completion.token_ids)
        return Delta(
            ids=array("i", ids),
            logprobs=array("f", (entry[i].logprob for i, entry in zip(ids, completion.logprobs or (), strict=True))),
            version=self.version,
            finish=finish_of(completion),
            stop_reason=completion.stop_reason,
            top=tuple(likeliest(i, entry) for i, entry in zip(ids, completion.logprobs or (), strict=True))
            if top
            else None,
        )


def ended(version: int, finish: EngineFinish, reason: str | None = None) -> Delta:
    return Delta(array("i"), array("f"), version, finish, reason)


def finish_of(completion: CompletionOutput) -> EngineFinish | None:
    if completion.finish_reason is None:
        return None
    return FINISHES.get(completion.finish_reason, EngineFinish.ERROR)


def likeliest(sampled: int, entry: Mapping[int, Any]) -> TopLogprobs:
    """vLLM gives the sampled token beside the likeliest ones; its rank says whether it is among them."""
    rows = sorted(entry.items(), key=lambda item: item[1].rank)
    ids, logprobs = tuple(i for i, _ in rows), tuple(row.logprob for _, row in rows)
    return TopLogprobs(ids, logprobs, entry[sampled].rank)


def sampling(fields: Mapping[str, Any]) -> SamplingParams:
    """vLLM's parameters of a request; text and stop strings are the client's, tokens and logprobs ours."""
    known = dict(fields)
    if known.get("structured_outputs") is not None:
        known["structured_outputs"] = StructuredOutputsParams(**known["structured_outputs"])
    known["logprobs"] = known.get("logprobs") or 0
    return SamplingParams(**known, detokenize=False, output_kind=RequestOutputKind.DELTA)
