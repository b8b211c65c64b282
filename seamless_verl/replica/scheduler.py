"""vLLM's scheduler, whose engine continues a grammar where an earlier request of the same call was cut.

A continuation has the tokens that its call produced so far at the end of its prompt, and vLLM begins a grammar with
the first token it samples itself. Here a grammar accepts those tokens when it is compiled, in the thread that compiles
it; with a reasoning parser, those after the reasoning.

An engine keeps to the grammar library that its first grammar needed. Where schemas need different ones, two engines
may differ in how a few characters are escaped; a continuation that the second does not allow ends with an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

logger = init_logger("vllm.seamless_verl.scheduler")  # shown as vLLM's own in the engine's process
RESUMED_TOKENS = "seamless_resumed_tokens"
"""In SamplingParams.extra_args: how many ids at the end of the prompt the call produced itself."""


class ContinuedGrammars(Scheduler):  # type: ignore[misc]
    """Owned state: none of its own."""

    def __init__(self, *parts: Any, **named: Any) -> None:
        super().__init__(*parts, **named)
        manager = self.structured_output_manager
        manager._create_grammar = partial(resumed_grammar, manager, manager._create_grammar)


class ContinuedAsyncGrammars(ContinuedGrammars, AsyncScheduler):  # type: ignore[misc]
    """For an engine that schedules ahead of what it has sampled."""


def resumed_grammar(
    manager: StructuredOutputManager, create: Callable[[Request], StructuredOutputGrammar], request: Request
) -> StructuredOutputGrammar:
    """The compiled grammar of a request, advanced over the resumed tokens.

    Raises:
        ValueError: it does not allow that; vLLM ends the request with an error.
    """
    grammar = create(request)
    resumed = (request.sampling_params.extra_args or {}).get(RESUMED_TOKENS, 0)
    begin = grammar_begin(manager, request, resumed) if resumed else None
    for token in () if begin is None else request.prompt_token_ids[begin:]:
        if not grammar.accept_tokens(request.request_id, [token]):
            problem = f"request {request.request_id}: its grammar does not allow its {resumed} resumed tokens"
            logger.error(problem)
            raise ValueError(problem)
    return grammar


def grammar_begin(manager: StructuredOutputManager, request: Request, resumed: int) -> int | None:
    """Where in the prompt the grammar's tokens begin; None while the reply still reasons."""
    structured, ids = request.structured_output_request, list(request.prompt_token_ids)
    own = len(ids) - resumed
    reasoner = manager._get_reasoner(request)
    if reasoner is None or manager.enable_in_reasoning:
        return own
    if structured.reasoning_ended is None:
        structured.reasoning_ended = reasoner.is_reasoning_end(ids[:own])
    if structured.reasoning_ended:
        return own
    if not reasoner.is_reasoning_end_streaming(ids, ids[own:]):
        return None
    structured.reasoning_ended = True
    return reasoning_end(reasoner, ids, own, set(manager.tokenizer.get_added_vocab().values()))


def reasoning_end(reasoner: Any, ids: Sequence[int], own: int, marks: set[int]) -> int:
    """Where a reasoning ends that ends after `own`: as vLLM finds it token by token, but first at those that may mark
    it and those behind them, since to look at one costs a walk through all before it."""
    near = [i for i in range(own, len(ids)) if ids[i] in marks or (i > own and ids[i - 1] in marks)]
    for last in (*near, *range(own, len(ids))):
        if reasoner.is_reasoning_end_streaming(ids[: last + 1], ids[last : last + 1]):
            return last + 1
    return len(ids)


def scheduler(*, vllm_config: Any, **parts: Any) -> SchedulerInterface:
    """In the place of the class that vLLM would take for such an engine."""
    ahead = vllm_config.scheduler_config.async_scheduling
    return (ContinuedAsyncGrammars if ahead else ContinuedGrammars)(vllm_config=vllm_config, **parts)


NAME = f"{scheduler.__module__}.{scheduler.__qualname__}"
"""By which vLLM imports it, as its `scheduler_cls`."""
