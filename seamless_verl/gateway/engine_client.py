"""An EngineClient without an engine of its own: what vLLM's serving classes ask besides `generate`.

The replicas behind it are run by the rollout manager; whatever would touch an engine directly is refused.

vLLM's EngineClient over a fleet: the serving classes call `generate`, a CallSource gives the tokens.

Per request: sampling parameters are checked by vLLM's input processor and bounded by the session, each choice
becomes one RunningCall, and their outputs meet in vLLM's own collector, which merges what a slow reader missed.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Callable, Iterable
from copy import copy
from functools import partial
from http import HTTPStatus
from typing import Any, NoReturn

from msgspec import structs
from vllm.config import VllmConfig
from vllm.engine.protocol import EngineClient
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.renderers import renderer_from_config
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest

from seamless_verl.gateway.outputs import Decoder, asked_of
from seamless_verl.gateway.protocols import CallSource, NullRecorder, Recorder, SessionCall
from seamless_verl.gateway.request_context import RequestContext, current
from seamless_verl.gateway.resumed_calls import ResumedRecorder, ResumedSource, counting, produced, resumed
from seamless_verl.gateway.retries import CallOutput
from seamless_verl.gateway.running_call import RunningCall, finish_reply
from seamless_verl.gateway.session import SessionState
from seamless_verl.journal import StoredCall
from seamless_verl.trajectory.records import TOKEN


def _elsewhere(what: str) -> NoReturn:
    raise NotImplementedError(f"{what} is the rollout manager's, not the gateway's")


class IdleEngineClient(EngineClient):
    """All of the protocol but `generate` and `abort`."""

    is_running = True
    is_stopped = False
    errored = False
    dead_error = EngineDeadError()

    async def encode(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        _elsewhere("pooling")
        yield

    async def notify_kv_transfer_request_rejected(self, *args: Any, **kwargs: Any) -> None: ...

    async def get_supported_tasks(self) -> tuple[Any, ...]:
        return ("generate",)

    async def is_tracing_enabled(self) -> bool:
        return False

    async def do_log_stats(self) -> None: ...

    async def check_health(self) -> None: ...

    async def start_profile(self) -> None:
        _elsewhere("profiling")

    async def stop_profile(self) -> None:
        _elsewhere("profiling")

    async def reset_mm_cache(self) -> None: ...

    async def reset_encoder_cache(self) -> None: ...

    async def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        _elsewhere("the prefix cache")

    async def sleep(self, *args: Any, **kwargs: Any) -> None:
        _elsewhere("sleep")

    async def wake_up(self, *args: Any, **kwargs: Any) -> None:
        _elsewhere("waking up")

    async def is_sleeping(self) -> bool:
        return False

    async def add_lora(self, *args: Any, **kwargs: Any) -> bool:
        _elsewhere("loading adapters")

    async def pause_generation(self, *args: Any, **kwargs: Any) -> None:
        _elsewhere("pausing")

    async def resume_generation(self) -> None:
        _elsewhere("resuming")

    async def is_paused(self) -> bool:
        return False

    def shutdown(self, timeout: float | None = None) -> None: ...


class FleetEngineClient(IdleEngineClient):
    """Serves sessions; needs a VllmConfig for rendering and checking, and starts no engine."""

    def __init__(self, vllm_config: VllmConfig, *, source: CallSource, recorder: Recorder) -> None:
        self.vllm_config, self.model_config = vllm_config, vllm_config.model_config
        self.renderer = renderer_from_config(vllm_config)
        self.input_processor = InputProcessor(vllm_config, self.renderer)
        self._source, self._recorder = source, recorder
        self._running: dict[asyncio.Task[None], RunningCall] = {}

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of one request of the current session, in the kind its parameters ask for.

        Raises:
            VLLMValidationError: a parameter or the prompt's length cannot be.
            GracefulHTTPError: the session has ended.
            GenerationError, EngineGenerateError: a call failed; it is on record as FAILED.
        """
        exchange = current()
        request = self._request(exchange, prompt, sampling_params, request_id, options)
        assert request.sampling_params is not None
        queue = RequestOutputCollector(request.sampling_params.output_kind, request.request_id)
        calls = [self._run(exchange, queue, *child) for child in _children(request)]
        try:
            finished = False
            while not finished:
                output = queue.get_nowait() or await queue.get()
                assert isinstance(output, RequestOutput)
                finished = output.finished
                yield output
        finally:
            for call in calls:
                call.leave()

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends the calls of these requests; two requests of one id both end."""
        ids = {request_id} if isinstance(request_id, str) else set(request_id)
        for running in self._running.values():
            if running.request_id in ids:
                running.cancel()

    async def drain(self) -> None:
        """Returns when every call that was cancelled or ended is on record as such."""
        while self._running:
            await asyncio.wait(self._running)

    async def cancel(self, session_id: str) -> None:
        """Ends the calls of a session; returns when they are on record."""
        theirs = [task for task, one in self._running.items() if one.call.session_id == session_id]
        for task in theirs:
            self._running[task].cancel()
        if theirs:
            await asyncio.wait(theirs)

    def _request(
        self, exchange: RequestContext, prompt: Any, params: SamplingParams, request_id: str, options: dict[str, Any]
    ) -> EngineCoreRequest:
        session = exchange.session
        if session.state is not SessionState.OPEN:  # it ended while the request was rendered
            raise GracefulHTTPError(f"Session {session.session_id} is {session.state}", HTTPStatus.GONE)
        if params.prompt_logprobs is not None:
            raise VLLMValidationError("prompt_logprobs is not served; leave it out", parameter="prompt_logprobs")
        request = self.input_processor.process_inputs(
            request_id, prompt, bounded(exchange, params), ("generate",), lora_request=options.get("lora_request")
        )
        request.external_req_id = request_id  # an engine needs unique ids; here each call has its own collector
        request.reasoning_ended = options.get("reasoning_ended")
        request.reasoning_parser_kwargs = options.get("reasoning_parser_kwargs")
        return request

    def _run(
        self,
        exchange: RequestContext,
        queue: RequestOutputCollector,
        request: EngineCoreRequest,
        parent: ParentRequest | None,
        index: int,
    ) -> RunningCall:
        place, call_id = exchange.next_call()
        earlier, cut = exchange.earlier(place), exchange.cut(place)
        call, source, recorder, counted = self._parts(_call(exchange, request, place, call_id), exchange, earlier, cut)
        tape = exchange.attempt.tapes[place] = earlier or CallOutput()
        if cut is not None:
            request = structs.replace(request, prompt_token_ids=cut.prompt_ids.tolist())
        running = RunningCall(
            call,
            source,
            recorder,
            Decoder(self.renderer.tokenizer, request, parent, index),
            tape if earlier is None else CallOutput(),
            queue.put,
            partial(finish_reply, exchange, self.renderer.tokenizer, self.model_config, fresh=earlier is None),
            counted,
            request_id=request.external_req_id or "",
        )
        task = running.start()
        self._running[task] = running
        task.add_done_callback(self._running.pop)
        return running

    def _parts(
        self, call: SessionCall, exchange: RequestContext, earlier: CallOutput | None, cut: StoredCall | None
    ) -> tuple[SessionCall, CallSource, Recorder, Callable[[int], None]]:
        """The call, where its tokens come from, who records them and who counts them."""
        if earlier is not None:
            return call, earlier, NullRecorder(), _uncounted
        if cut is None:
            return call, self._source, self._recorder, exchange.session.count
        known = produced(cut)
        recorder, counted = ResumedRecorder(self._recorder, known), counting(exchange.session, known)
        return resumed(call, cut), ResumedSource(cut, self._source), recorder, counted


def _call(exchange: RequestContext, request: EngineCoreRequest, place: int, call_id: str) -> SessionCall:
    session = exchange.session
    assert request.prompt_token_ids is not None
    return SessionCall(
        call_id,
        array(TOKEN, request.prompt_token_ids),
        asked_of(request),
        key=session.session_id,
        session_id=session.session_id,
        digest=exchange.digest,
        request=exchange.normalized(),
        attempt=exchange.attempt.number,
        place=place,
        idempotency_key=exchange.attempt.key,
    )


def bounded(exchange: RequestContext, params: SamplingParams) -> SamplingParams:
    """The parameters as the session has it: what it decides, and no more tokens than it may still generate."""
    session = exchange.session
    changes: dict[str, Any] = session.sampling.chosen(exchange.body)
    budget = session.call_budget()
    if exchange.repeats and budget is not None:
        budget = max(budget, 1)  # what is repeated was given its budget; no parameters say 0
    if budget is not None and (params.max_tokens is None or params.max_tokens > budget):
        changes["max_tokens"] = budget
    return structs.replace(params, **changes) if changes else params


def _children(request: EngineCoreRequest) -> list[tuple[EngineCoreRequest, ParentRequest | None, int]]:
    """The request itself, or one for each of its choices."""
    assert request.sampling_params is not None
    if request.sampling_params.n == 1:
        return [(request, None, 0)]
    parent = ParentRequest(request)
    children = []
    for index in range(request.sampling_params.n):
        child = copy(request)
        child.request_id, child.sampling_params = parent.get_child_info(index)
        children.append((child, parent, index))
    return children


def _uncounted(tokens: int) -> None:
    """A repetition generates nothing."""
