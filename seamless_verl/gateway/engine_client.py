"""vLLM's EngineClient over a fleet: the serving classes call `generate`, and a CallSource gives the tokens.

It has no engine of its own: the rollout manager runs the replicas, so what would touch an engine directly is refused.
"""

from __future__ import annotations

import asyncio
from abc import update_abstractmethods
from array import array
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable
from copy import copy
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from msgspec import structs
from vllm.config import VllmConfig
from vllm.engine.protocol import EngineClient
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.renderers import renderer_from_config
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest

from seamless_verl.gateway.calls import CallSource, RecordedCall, RecordedSource, SessionCall, asked_digest
from seamless_verl.gateway.images import packed_images
from seamless_verl.gateway.outputs import Decoder, engine_sampling, stop_strings
from seamless_verl.gateway.recorder import JournalRecorder
from seamless_verl.gateway.request_context import Rendered, RequestContext, current_request
from seamless_verl.gateway.retries import CallOutput
from seamless_verl.gateway.running_call import RunningCall
from seamless_verl.gateway.session import SessionState
from seamless_verl.platform.vllm_versions import GracefulHTTPError
from seamless_verl.trajectory.records import TOKEN

REFUSED = (
    *("encode", "start_profile", "stop_profile", "reset_prefix_cache", "sleep", "wake_up", "add_lora"),
    *("pause_generation", "resume_generation"),
)
"""Methods of an engine client that need an engine."""


def refuse(client: type[Any]) -> type[Any]:
    """Gives a class the methods of REFUSED; any other that a version of vLLM adds still has to be written."""
    for name in REFUSED:

        async def method(self: Any, *args: Any, refused: str = name, **kwargs: Any) -> None:
            raise NotImplementedError(f"{refused} is the rollout manager's, not the gateway's")

        setattr(client, name, method)
    return update_abstractmethods(client)


@refuse
class FleetEngineClient(EngineClient):
    """Runs the calls of sessions; needs a VllmConfig for rendering and checking, and starts no engine.

    Owned state: the running calls by their tasks; `malformed_calls` counts replies with tool calls that cannot be read.
    """

    is_running, is_stopped, errored, dead_error = True, False, False, EngineDeadError()

    def __init__(self, vllm_config: VllmConfig, *, source: CallSource, recorder: JournalRecorder) -> None:
        self.vllm_config, self.model_config = vllm_config, vllm_config.model_config
        self.renderer = renderer_from_config(vllm_config)
        self.input_processor = InputProcessor(vllm_config, self.renderer)
        self._source, self._recorder = source, recorder
        self._running: dict[asyncio.Task[None], RunningCall] = {}
        self._by_session = defaultdict[str, set[asyncio.Task[None]]](set)  # the same tasks
        self.malformed_calls = 0

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of the current session's request, in the kind that its parameters ask for.

        Raises VLLMValidationError for a parameter or a length that is not valid, GracefulHTTPError where the session
        has ended, GenerationError or EngineGenerateError where a call failed, which is on record as FAILED.
        """
        context = current_request()
        request = self._check_request(context, prompt, sampling_params, request_id, options)
        assert request.sampling_params is not None
        queue = RequestOutputCollector(request.sampling_params.output_kind, request.request_id)
        calls = [self._start_call(context, queue, *child) for child in _split_choices(request)]
        try:
            finished = False
            while not finished:
                output = queue.get_nowait() or await queue.get()
                assert isinstance(output, RequestOutput)
                finished = output.finished
                yield output
        finally:
            while calls:  # emptied: a traceback of an error that ended them would keep this frame, and so them
                calls.pop().detach()

    def _count_malformed(self) -> None:
        self.malformed_calls += 1

    def _make_parser(self, rendered: Rendered) -> Any:
        """The parser of the reply; None where the model has none."""
        if rendered.parser is None:
            return None
        settings = {"chat_template_kwargs": dict(rendered.settings), "model_config": self.model_config}
        return rendered.parser(self.renderer.tokenizer, rendered.request.tools, **settings)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Cancels the calls of these requests; of two requests with one id, both."""
        ids = {request_id} if isinstance(request_id, str) else set(request_id)
        for running in self._running.values():
            if running.request_id in ids:
                running.cancel()

    async def get_supported_tasks(self) -> tuple[Any, ...]:
        return ("generate",)

    async def _no(self) -> bool:
        return False

    async def _do_nothing(self, *args: Any, **kwargs: Any) -> None: ...

    is_tracing_enabled = is_sleeping = is_paused = _no
    do_log_stats = check_health = notify_kv_transfer_request_rejected = _do_nothing
    reset_mm_cache = reset_encoder_cache = _do_nothing

    def shutdown(self, timeout: float | None = None) -> None: ...

    async def drain(self) -> None:
        """Returns when every running call has ended and its end is on record."""
        while self._running:
            await asyncio.wait(self._running)

    async def cancel(self, session_id: str) -> None:
        """Cancels the calls of a session; returns when their ends are on record."""
        tasks = list(self._by_session.get(session_id, ()))
        for task in tasks:
            self._running[task].cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _check_request(
        self, context: RequestContext, prompt: Any, params: SamplingParams, request_id: str, options: dict[str, Any]
    ) -> EngineCoreRequest:
        session = context.session
        if session.state is not SessionState.OPEN:  # it ended while the request was rendered
            raise GracefulHTTPError(f"Session {session.session_id} is {session.state}", HTTPStatus.GONE)
        if params.prompt_logprobs is not None:
            raise VLLMValidationError("prompt_logprobs is not served; leave it out", parameter="prompt_logprobs")
        request = self.input_processor.process_inputs(
            request_id,
            prompt,
            bound_sampling(context, params),
            ("generate",),
            lora_request=options.get("lora_request"),
        )
        request.external_req_id = request_id  # an engine needs unique ids; here each call has its own collector
        request.reasoning_ended = options.get("reasoning_ended")
        request.reasoning_parser_kwargs = options.get("reasoning_parser_kwargs")
        return request

    def _start_call(
        self,
        context: RequestContext,
        queue: RequestOutputCollector,
        request: EngineCoreRequest,
        parent: ParentRequest | None,
        choice: int,
    ) -> RunningCall:
        index, call_id = context.next_call()
        earlier, interrupted = context.earlier_output(index), context.take_interrupted_call(index)
        call = self._with_routes(_session_call(context, request, index, call_id, choice))
        session, recorder, source, recorded = context.session, self._recorder, self._source, 0
        if earlier is not None:
            recorder, source = None, earlier
        elif interrupted is not None:
            known = RecordedCall(interrupted.segments)
            call, source, recorded = (
                self._with_routes(call.resumed(interrupted)),
                RecordedSource(known, source),
                len(known),
            )
            request = structs.replace(request, prompt_token_ids=interrupted.prompt_ids.tolist())
        elif session.recorded_calls is not None and (repeated := session.recorded_calls.take(call)) is not None:
            source = RecordedSource(repeated, source)
        session.images.update(call.files)
        output = CallOutput()
        context.attempt.outputs[index] = earlier or output
        decoder = Decoder(self.renderer.tokenizer, request, parent, choice)
        running = RunningCall(
            *(call, context, source, recorder, decoder, output, queue.put, self._make_parser, self._count_malformed),
            recorded=recorded,
            request_id=request.external_req_id or "",
        )
        task = running.start()
        self._running[task] = running
        self._by_session[running.call.session_id].add(task)
        task.add_done_callback(self._forget)
        return running

    def _with_routes(self, call: SessionCall) -> SessionCall:
        return replace(call, routes_from=self._recorder.routes_needed_from(call))

    def _forget(self, task: asyncio.Task[None]) -> None:
        session_id = self._running.pop(task).call.session_id
        tasks = self._by_session[session_id]
        tasks.discard(task)
        if not tasks:
            del self._by_session[session_id]


def _session_call(
    context: RequestContext, request: EngineCoreRequest, index: int, call_id: str, choice: int
) -> SessionCall:
    session = context.session
    assert request.prompt_token_ids is not None and request.sampling_params is not None
    prompt_ids, sampling = array(TOKEN, request.prompt_token_ids), engine_sampling(request)
    images = () if context.rendered is None else context.rendered.images
    files = {image.digest: context.images[image.digest] for image in images}
    return SessionCall(
        call_id,
        prompt_ids,
        session.seeded(sampling, choice),
        key=session.session_id,
        group=session.uid,
        validation=session.validation,
        traceparent=context.traceparent,
        session_id=session.session_id,
        digest=context.digest,
        request=context.stored_request(),
        attempt=context.attempt.number,
        index=index,
        idempotency_key=context.attempt.key,
        response=context.stored_response(),
        dropped_tools=context.dropped_tools,
        replaced_media=context.replaced_media,
        reply_name=context.attempt.reply_name,
        # with the seed as the agent gave it: a session that begins this one again asks the same
        asked=asked_digest(prompt_ids, sampling, stop_strings(request.sampling_params), index, images),
        images=images,
        files=files,
        media=packed_images(images, files),
    )


def bound_sampling(context: RequestContext, params: SamplingParams) -> SamplingParams:
    """The parameters with those that the session sets, and at most the tokens that it may still generate."""
    session = context.session
    changes: dict[str, Any] = session.sampling.resolve(context.parameters)
    budget = session.call_budget()
    if context.is_retry and budget is not None:
        budget = max(budget, 1)  # the retried call was given its budget before; parameters cannot be 0
    if budget is not None and (params.max_tokens is None or params.max_tokens > budget):
        changes["max_tokens"] = budget
    return structs.replace(params, **changes) if changes else params


def _split_choices(request: EngineCoreRequest) -> list[tuple[EngineCoreRequest, ParentRequest | None, int]]:
    """The request itself, or one request for each of its choices: (request, parent, index of the choice)."""
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
