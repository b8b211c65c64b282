"""vLLM's scheduler, which also takes up a grammar where an earlier request of the same call was cut.

A continuation has the tokens that its call produced so far at the end of its prompt, and vLLM begins a grammar with
the first token it samples itself. Here the grammar first takes those; with a reasoning parser, those after the
reasoning.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

CARRIED = "seamless_carried"
"""In SamplingParams.extra_args: how many ids at the end of the prompt the call produced itself."""


class ContinuedGrammars(Scheduler):  # type: ignore[misc]
    """Owned state: none of its own. A grammar takes what was carried once, when it is compiled."""

    def _try_promote_blocked_waiting_request(self, request: Request) -> bool:
        waited = request.status
        if not super()._try_promote_blocked_waiting_request(request):
            return False
        if waited != RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            return True
        if taken_up(request, self.structured_output_manager):
            return True
        request.status = waited
        self.grammar_compile_error_reqs.add(request.request_id)  # vLLM ends it with an error
        return False


class ContinuedAsyncGrammars(ContinuedGrammars, AsyncScheduler):  # type: ignore[misc]
    """For an engine that schedules ahead of what it has sampled."""


def taken_up(request: Request, manager: StructuredOutputManager) -> bool:
    """Whether the grammar of the request, which is compiled, allows what was carried; it stands after that."""
    carried = ((request.sampling_params.extra_args or {}).get(CARRIED, 0)) if request.sampling_params else 0
    begin = grammar_begin(request, manager, carried) if carried else None
    if begin is None:
        return True
    taken = list(request.prompt_token_ids[begin:])
    return not taken or bool(request.structured_output_request.grammar.accept_tokens(request.request_id, taken))


def grammar_begin(request: Request, manager: StructuredOutputManager, carried: int) -> int | None:
    """Where in the prompt the grammar's tokens begin; None while the reply still reasons."""
    structured, ids = request.structured_output_request, list(request.prompt_token_ids)
    own = len(ids) - carried
    reasoner = manager._get_reasoner(request)
    if reasoner is None or manager.enable_in_reasoning:
        return own
    if structured.reasoning_ended is None:
        structured.reasoning_ended = reasoner.is_reasoning_end(ids[:own])
    if structured.reasoning_ended:
        return own
    for end in range(own + 1, len(ids) + 1):
        if reasoner.is_reasoning_end_streaming(ids[:end], ids[end - 1 : end]):
            structured.reasoning_ended = True
            return end
    return None


def scheduler(*, vllm_config: Any, **parts: Any) -> SchedulerInterface:
    """In the place of the class that vLLM would take for such an engine."""
    ahead = vllm_config.scheduler_config.async_scheduling
    return (ContinuedAsyncGrammars if ahead else ContinuedGrammars)(vllm_config=vllm_config, **parts)


NAME = f"{scheduler.__module__}.{scheduler.__qualname__}"
"""By which vLLM imports it, as its `scheduler_cls`."""
