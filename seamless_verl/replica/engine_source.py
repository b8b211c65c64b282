"""vLLM's AsyncLLM as a source of token chunks, each with the weight version that generated it.

Invariant: the version changes only while the engine is paused, after every token that it made before has reached this
process and been counted under the old one.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from array import array
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vllm import SamplingParams, TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import RequestOutputCollector

from seamless_verl.errors import ReplicaLostError
from seamless_verl.platform.vllm_versions import VLLMClientError, set_stream_interval, take_stream_interval
from seamless_verl.replica.own_logprobs import LABELS, alters, split_rank
from seamless_verl.replica.running_request import (
    RouteReader,
    RunningRequest,
    finish_of,
    stop_reason_of,
    top_logprobs,
)
from seamless_verl.rollout.engine import BESIDE_SAMPLING, FIRST_PROMPT, RESUMED_TOKENS, EngineRequest, PauseMode
from seamless_verl.trajectory.records import Finish, TokenChunk, empty_chunk
from seamless_verl.trajectory.routes import Routes

logger = logging.getLogger(__name__)
DRAIN_S = 60.0  # for tokens on their way from the engine; they take milliseconds unless it hangs
PART_OF_CHARACTER = "\ufffd"  # what a tokenizer decodes the first bytes of a character to
UNBOUNDED = 1 << 62  # more tokens than a request can have
REMEMBERED = 16384  # conversations; the next request of a forgotten one computes its whole prompt again
DRAFTS = (
    "with speculative decoding the model's own logprobs of calls with a grammar, or with sampling parameters other than"
    " the temperature, are proved on vLLM's first model runner only. Take speculative_config out of"
    " actor_rollout_ref.rollout.engine_kwargs.vllm, or set VLLM_USE_V2_MODEL_RUNNER=0 for the replicas of vLLM 0.29"
)
NO_ROUTES = (
    "routes were asked for, and its engine returns none. Set"
    " actor_rollout_ref.rollout.enable_rollout_routing_replay=True, with which verl's server starts its engine so"
)


@contextmanager
def lost_if_dead(replica_id: str) -> Iterator[None]:
    """Turns vLLM's error for an engine whose process died into ReplicaLostError."""
    try:
        yield
    except EngineDeadError as dead:
        raise ReplicaLostError(replica_id, "its engine's process died") from dead


class CacheSalts:
    """The prefix cache salt of each conversation: the weight version at its first request to this engine.

    So its requests share cache blocks across commits, also with conversations that began under the same version.
    """

    def __init__(self) -> None:
        self.first_version: dict[str, int] = {}  # in order of use

    def salt(self, conversation: str, version: int) -> str:
        if not conversation:
            return str(version)
        self.first_version[conversation] = self.first_version.pop(conversation, version)
        if len(self.first_version) > REMEMBERED:
            del self.first_version[next(iter(self.first_version))]
        return str(self.first_version[conversation])


class AsyncLLMSource:
    """One engine; `version` is that of the weights it was started with.

    `on_busy` is called with True when the engine gets something to generate, and with False when it has nothing left.
    With `keep_kv` a commit leaves the KV cache of older weights to conversations that began before it. With
    `own_logprobs` the workers record the model's own logprobs (`own_logprobs.py`), and tokens sampled under a grammar
    are labelled; without `of_drafts` calls for which vLLM's own would be recorded of drafted tokens are refused.
    `collapsed` gives a prompt's ids as vLLM takes them beside its images. With `lora` all calls are of that adapter,
    which every load of weights replaces.
    """

    def __init__(
        self,
        engine: AsyncLLM,
        version: int,
        *,
        replica_id: str = "",
        keep_kv: bool = False,
        on_busy: Callable[[bool], None] | None = None,
        own_logprobs: bool = False,
        of_drafts: bool = True,
        collapsed: Callable[[list[int]], list[int]] = list,
        lora: LoRARequest | None = None,
    ) -> None:
        self.lora = lora
        self.engine, self.version, self.replica_id, self.collapsed = engine, version, replica_id, collapsed
        self.keep_kv, self.on_busy = keep_kv, on_busy or (lambda busy: None)
        self.salts = CacheSalts()
        self.stores_kv = engine.vllm_config.kv_transfer_config is not None  # beside its cache, perhaps for ever
        self.paused: PauseMode | None = None
        self.in_flight: dict[str, RunningRequest] = {}
        self.unpacking: set[str] = set()  # requests whose images are decoded, less those that were aborted
        self.own_logprobs, self.of_drafts = own_logprobs, of_drafts
        self._lacked_routes = False  # and it was said
        self.prompt_tokens = self.cached_tokens = 0  # of requests that have begun to generate

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenChunk, None]:
        """Chunks as the engine makes them; closing the generator aborts the request."""
        with lost_if_dead(self.replica_id):
            try:
                media, aborted = await self._unpacked(request)
                if aborted or self.paused is PauseMode.ABORT:  # a pause does not wait for images
                    yield self._end(Finish.CUT)
                    return
                collector = await self._send(request, media)
            except (ValueError, VLLMClientError) as error:
                yield self._end(Finish.FAILED, str(error))
                return
            labels = self.own_logprobs and bool(request.sampling.get("structured_outputs"))
            routes = self._route_reader(request, collector.request_id)
            running = RunningRequest(collector, bool(request.sampling.get("logprobs")), labels, routes)
            self._add_running(request.request_id, running)
            output: RequestOutput | None = None
            try:
                if self.paused is PauseMode.ABORT:  # paused since the check above, without knowing of this request
                    await self.abort(request.request_id)
                while output is None or not output.finished:
                    first = output is None
                    output = collector.get_nowait() or await collector.get()
                    assert isinstance(output, RequestOutput)
                    if first and output.outputs and output.outputs[0].token_ids:  # else it ended before it began
                        self.prompt_tokens += len(request.prompt_ids)
                        self.cached_tokens += output.num_cached_tokens or 0
                    for chunk in self.chunks(running, output):
                        yield chunk
            finally:
                self._remove_running(request.request_id, running)
                collector.close()
                if output is None or not output.finished:
                    await self.engine.abort(collector.request_id, internal=True)

    async def _unpacked(self, request: EngineRequest) -> tuple[dict[str, Any], bool]:
        """The fields of its prompt beside the ids, and whether it was aborted meanwhile."""
        if not request.media:
            return {}, False
        self.unpacking.add(request.request_id)
        try:
            media = await unpacked(request.media)
            return media, request.request_id not in self.unpacking
        finally:
            self.unpacking.discard(request.request_id)

    async def _send(self, request: EngineRequest, media: Mapping[str, Any]) -> RequestOutputCollector:
        """Gives the engine a request; raises ValueError or VLLMClientError where it refuses it."""
        ids = request.prompt_ids.tolist()
        prompt = TokensPrompt(prompt_token_ids=self.collapsed(ids) if media else ids)
        if media:
            prompt.update(media)  # type: ignore[typeddict-item]
        if self.keep_kv:
            prompt["cache_salt"] = self.salts.salt(request.conversation, self.version)
        elif self.stores_kv:
            prompt["cache_salt"] = str(self.version)
        fields = dict(request.sampling)
        reasoning = {name: fields.pop(name, None) for name in BESIDE_SAMPLING}
        if all(value is None for value in reasoning.values()):
            reasoning["reasoning_ended"] = True  # no reasoning parser: a grammar applies from the first token on
        interval = take_stream_interval(fields)
        params = sampling_params(fields, request.resumed_tokens, request.first_prompt, labels=self.own_logprobs)
        if self.engine.model_config.enable_return_routed_experts:  # of a request that asks for none, of one position
            params.routed_experts_prompt_start = (request.routes_from or len(request.prompt_ids)) - 1
        elif request.routes_from is not None:
            raise ValueError(NO_ROUTES)
        if self.own_logprobs and not self.of_drafts and self._alters(params):
            raise ValueError(DRAFTS)
        try:
            collector = await self.engine.add_request(
                request.request_id, prompt, params, lora_request=self.lora, priority=request.priority, **reasoning
            )
        except asyncio.CancelledError:  # the engine may have the request already
            await self.engine.abort(request.request_id)
            raise
        set_stream_interval(self.engine, collector.request_id, interval)
        if params.stop:
            self._follow_text(collector.request_id, request)
        return collector

    def _route_reader(self, request: EngineRequest, request_id: str) -> RouteReader | None:
        if request.routes_from is None:
            return None
        state = self.engine.output_processor.request_states.get(request_id)
        return RouteReader(state, len(request.prompt_ids) - request.routes_from)

    def _follow_text(self, request_id: str, request: EngineRequest) -> None:
        """Lets vLLM find a stop string that begins in the resumed tokens, which are prompt to it."""
        state = self.engine.output_processor.request_states.get(request_id)
        if state is None:  # it has ended
            return
        state.logprobs_processor.tokenizer = None  # no text of the likeliest tokens: HIDDEN has none
        if request.resumed_tokens:
            resumed = request.prompt_ids[-request.resumed_tokens :].tolist()
            text = self.engine.get_tokenizer().decode(
                resumed, skip_special_tokens=state.detokenizer.skip_special_tokens
            )
            state.detokenizer.output_text = text.rstrip(PART_OF_CHARACTER) + state.detokenizer.output_text

    def _alters(self, params: SamplingParams) -> bool:
        mode = self.engine.model_config.logprobs_mode
        return params.structured_outputs is not None or alters(params, mode)

    async def abort(self, request_id: str) -> None:
        """Ends one request with CUT; one that is not running is no error."""
        self.unpacking.discard(request_id)
        if (running := self.in_flight.get(request_id)) is not None:
            await self.engine.abort(running.collector.request_id, internal=True)

    async def pause(self, mode: PauseMode) -> None:
        """Stops generating; with `abort` every request in flight is cut, and so is every later one.

        As `AsyncLLM.pause_generation` without its sleep of 20 ms: `commit` waits until earlier tokens have arrived.
        """
        self.paused = mode
        with lost_if_dead(self.replica_id):
            await self.engine.engine_core.pause_scheduler_async(mode=mode.value, clear_cache=False)
        self.on_busy(False)

    async def resume(self) -> None:
        with lost_if_dead(self.replica_id):
            await self.engine.resume_generation()
        self.paused = None
        self.on_busy(bool(self.in_flight))

    async def commit(self, version: int) -> None:
        """Declares that the paused engine now has the weights of `version`.

        Drops the KV cache of the old weights unless `keep_kv`. Requests in flight compute theirs again at the resume,
        so that each later token has the probability that the new weights give it.
        """
        limit = asyncio.get_running_loop().time() + DRAIN_S
        while not self.drained():  # a few turns of the event loop, in which the engine's replies arrive
            if self.engine.errored or asyncio.get_running_loop().time() > limit:
                raise RuntimeError(f"version {version}: tokens of older weights are stuck on their way from the engine")
            await asyncio.sleep(0)  # one of these turns; the limit above ends them
        self.record_versions()
        if not self.keep_kv and not await self.engine.reset_prefix_cache(
            reset_running_requests=True, reset_connector=True
        ):
            raise RuntimeError(f"version {version}: the engine kept blocks of its KV cache that old weights made")
        self.version = version

    def drained(self) -> bool:
        """Whether the state of each request has every token generated before the pause; replies arrive in order."""
        if not self.in_flight:
            return True
        queue = self.engine.engine_core.outputs_queue
        return queue.empty() and bool(queue._getters)  # the handler waits for more

    def record_versions(self) -> None:
        """Records that all tokens so far are of the current version."""
        states = self.engine.output_processor.request_states
        for running in self.in_flight.values():
            state = states.get(running.collector.request_id)
            detokenizer = None if state is None else state.detokenizer
            # without a detokenizer the request has ended: all of its tokens are of this version
            count = UNBOUNDED if detokenizer is None else detokenizer.num_output_tokens()
            if count > (running.versions[-1][0] if running.versions else running.delivered):
                running.versions.append((count, self.version))

    def chunks(self, running: RunningRequest, output: RequestOutput) -> Iterator[TokenChunk]:
        """One output as chunks, one for each weight version; the last has the finish reason."""
        if not output.outputs:
            yield self._end(Finish.CUT)
            return
        completion = output.outputs[0]
        ids = list(completion.token_ids)
        entries = (completion.logprobs or ())[: len(ids)]  # at an abort vLLM 0.24 adds those of the whole request
        values = [entry[i].logprob for i, entry in zip(ids, entries, strict=True)]
        labels = b""
        if running.labels:
            labels = bytes(split_rank(entry[i].rank)[1] for i, entry in zip(ids, entries, strict=True))
        of_prompt, routes = self._take_routes(running, len(ids), completion)
        for begin, end, version in running.spans(len(ids), self.version):
            last = end == len(ids)
            rows = zip(ids[begin:end], entries[begin:end], strict=True) if running.top else ()
            part = labels[begin:end]
            yield TokenChunk(
                ids=array("i", ids[begin:end]),
                logprobs=array("f", values[begin:end]),
                version=version,
                replica=self.replica_id,
                finish_reason=finish_of(completion) if last else None,
                stop_reason=stop_reason_of(completion) if last else None,
                top=tuple(top_logprobs(i, entry) for i, entry in rows) if running.top else None,
                grammar=part if any(part) else b"",
                routes=None if routes is None else routes.part(begin, end),
                prompt_routes=of_prompt if begin == 0 else None,
            )

    def _take_routes(
        self, running: RunningRequest, count: int, completion: CompletionOutput
    ) -> tuple[Routes | None, Routes | None]:
        """The prompt's routes, if these are the first tokens, and those of the next `count` tokens."""
        if running.routes is None or not count:
            return None, None
        of_prompt, routes = running.routes.take(count, completion)
        if routes is None and not self._lacked_routes:
            self._lacked_routes = True
            logger.error(
                "replica %s: its engine returned other routes than tokens: these are not trained", self.replica_id
            )
        return of_prompt, routes

    def _end(self, finish_reason: Finish, stop_reason: str | None = None) -> TokenChunk:
        return empty_chunk(finish_reason, version=self.version, replica=self.replica_id, stop_reason=stop_reason)

    def _add_running(self, request_id: str, running: RunningRequest) -> None:
        self.in_flight[request_id] = running
        if len(self.in_flight) == 1 and self.paused is None:
            self.on_busy(True)

    def _remove_running(self, request_id: str, running: RunningRequest) -> None:
        if self.in_flight.get(request_id) is running:  # a restarted client may use the same id
            del self.in_flight[request_id]
        if not self.in_flight and self.paused is None:
            self.on_busy(False)


async def unpacked(media: bytes) -> dict[str, Any]:
    """The fields of a prompt that were pickled by the run's gateway or agent loops: who has the connection's token.

    In a thread: this decodes pictures, while chunks, pauses and commands of weights go on.
    """
    fields: dict[str, Any] = await asyncio.to_thread(pickle.loads, media)
    return fields


def sampling_params(
    fields: Mapping[str, Any], resumed: int = 0, first_prompt: str = "", *, labels: bool = False
) -> SamplingParams:
    """vLLM's sampling parameters of a request, with logprobs; text is made only where stop strings are looked for.

    `labels`: a request with a grammar asks for labels of its tokens.
    """
    arguments = dict(fields)
    extra = dict(arguments.get("extra_args") or {})
    if arguments.get("structured_outputs") is not None:
        arguments["structured_outputs"] = StructuredOutputsParams(**arguments["structured_outputs"])
        extra |= {LABELS: True} if labels else {}
    extra |= {RESUMED_TOKENS: resumed} if resumed else {}
    extra |= {FIRST_PROMPT: first_prompt} if first_prompt else {}
    arguments["extra_args"] = extra or None
    arguments["logprobs"] = arguments.get("logprobs") or 0
    detokenize = bool(arguments.get("stop"))
    return SamplingParams(**arguments, detokenize=detokenize, output_kind=RequestOutputKind.DELTA)
