"""vLLM schedulers that resume a grammar where an earlier request of the same call was cut, and count events.

vLLM counts preemptions and drafts for its own log alone, which verl turns off. Here the scheduler sends those since the
last statistics: preemptions as their `preempted_requests`, a field that nothing else of vLLM reads.

The request that continues a call has the produced tokens at the end of its prompt, and vLLM begins a grammar with the
first token that it samples itself. Here a grammar is advanced over the produced tokens, those after the reasoning, when
it is compiled, in the thread that compiles it. If two engines' first grammars needed different libraries, they may
differ in how a few characters are escaped, and a continuation that the second does not allow ends with an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.request import Request
from vllm.v1.spec_decode.metrics import SpecDecodingStats
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from seamless_verl.platform.vllm_versions import ending_its_request
from seamless_verl.rollout.engine import RESUMED_TOKENS

logger = init_logger("vllm.seamless_verl.scheduler")  # shown as vLLM's own in the engine's process


class GrammarScheduler(Scheduler):  # type: ignore[misc]
    """vLLM's scheduler with resumed grammars.

    Owned state: how often the cache was reset, and since the last statistics the preemptions, but for those of a reset,
    and the drafted tokens that were verified and accepted.
    """

    resets = unsent = drafted = accepted = 0
    resetting = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Raises ValueError where a store beside the cache would keep the KV of old weights."""
        super().__init__(*args, **kwargs)
        if lasting := lasting_stores(self.connector):
            raise ValueError(
                f"rollout.engine_kwargs.vllm.kv_transfer_config: {', '.join(lasting)} has no reset_cache(), so that the"
                " KV of old weights would stay in its store after an update. Take a connector that has it, or none"
            )
        manager = self.structured_output_manager
        create = partial(resumed_grammar, manager, manager._create_grammar)
        manager._create_grammar = ending_its_request(create)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """vLLM's; afterwards no unfinished request has a block's name of before, by which a store may still have it."""
        self.resetting = True
        try:
            reset = bool(super().reset_prefix_cache(*args, **kwargs))
        finally:
            self.resetting = False
        if self.connector is not None:
            self.resets += 1
            for request in self.requests.values():
                request.cache_salt = f"{(request.cache_salt or '').partition('+')[0]}+{self.resets}"
                request.block_hashes = []
                request.update_block_hashes()
        return reset

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        self.unsent += not self.resetting

    def make_spec_decoding_stats(
        self, *args: Any, num_draft_tokens: int, num_accepted_tokens: int, **kwargs: Any
    ) -> SpecDecodingStats | None:
        self.drafted += num_draft_tokens
        self.accepted += num_accepted_tokens
        counts = {"num_draft_tokens": num_draft_tokens, "num_accepted_tokens": num_accepted_tokens}
        made: SpecDecodingStats | None = super().make_spec_decoding_stats(*args, **counts, **kwargs)
        return made

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        """vLLM's statistics, where it makes some, with our counts; else some that have nothing but the counts."""
        stats: SchedulerStats | None = super().make_stats(*args, **kwargs)
        if stats is None and (self.unsent or self.drafted):
            stats = SchedulerStats()
        if stats is not None:
            stats.prefix_cache_stats.preempted_requests, self.unsent = self.unsent, 0
            if self.drafted and stats.spec_decoding_stats is None:
                counts = {"num_draft_tokens": self.drafted, "num_accepted_tokens": self.accepted}
                stats.spec_decoding_stats = SpecDecodingStats(self.num_spec_tokens, **counts)
            self.drafted = self.accepted = 0
        return stats


class AsyncGrammarScheduler(GrammarScheduler, AsyncScheduler):  # type: ignore[misc]
    """For an engine that schedules ahead of what it has sampled."""


class EngineCounts:
    """Counts what the engine's schedulers send, from when it is made."""

    def __init__(self, engine: AsyncLLM) -> None:
        self.preempted = self.drafted = self.accepted = 0
        self._update = engine.output_processor.update_scheduler_stats
        engine.output_processor.update_scheduler_stats = self._count

    def _count(self, stats: SchedulerStats | None) -> None:
        if stats is not None:
            self.preempted += stats.prefix_cache_stats.preempted_requests
            if (drafts := stats.spec_decoding_stats) is not None:
                self.drafted += drafts.num_draft_tokens
                self.accepted += drafts.num_accepted_tokens
        self._update(stats)


def lasting_stores(connector: KVConnectorBase_V1 | None) -> list[str]:
    """The classes, of this connector and those within it, that do not implement `reset_cache`."""
    if connector is None:
        return []
    own = type(connector).reset_cache is KVConnectorBase_V1.reset_cache
    within = [name for one in getattr(connector, "_connectors", ()) for name in lasting_stores(one)]
    return [type(connector).__name__] * own + within


def resumed_grammar(
    manager: StructuredOutputManager, create: Callable[[Request], StructuredOutputGrammar], request: Request
) -> StructuredOutputGrammar:
    """The compiled grammar of a request, advanced over the resumed tokens; ValueError, which ends the request, if it
    allows them not.
    """
    grammar = create(request)
    resumed = (request.sampling_params.extra_args or {}).get(RESUMED_TOKENS, 0)
    start = grammar_start(manager, request, resumed) if resumed else None
    for token in () if start is None else request.prompt_token_ids[start:]:
        if not grammar.accept_tokens(request.request_id, [token]):
            problem = f"request {request.request_id}: its grammar does not allow its {resumed} resumed tokens"
            logger.error(problem)
            raise ValueError(problem)
    return grammar


def grammar_start(manager: StructuredOutputManager, request: Request, resumed: int) -> int | None:
    """The position in the prompt at which the grammar's tokens begin; None if the reply is still reasoning."""
    structured, ids = request.structured_output_request, list(request.prompt_token_ids)
    reply_start = len(ids) - resumed
    reasoner = manager._get_reasoner(request)
    if reasoner is None or manager.enable_in_reasoning:
        return reply_start
    if structured.reasoning_ended is None:
        structured.reasoning_ended = reasoner.is_reasoning_end(ids[:reply_start])
    if structured.reasoning_ended:
        return reply_start
    if not reasoner.is_reasoning_end_streaming(ids, ids[reply_start:]):
        return None
    structured.reasoning_ended = True
    return reasoning_end(reasoner, ids, reply_start, set(manager.tokenizer.get_added_vocab().values()))


def reasoning_end(reasoner: Any, ids: Sequence[int], reply_start: int, end_tokens: set[int]) -> int:
    """The position after a reasoning that ends behind `reply_start`.

    vLLM looks token by token, each time through all earlier ones: so what may mark the end is tried first.
    """
    reply = range(reply_start, len(ids))
    likely = [i for i in reply if ids[i] in end_tokens or (i > reply_start and ids[i - 1] in end_tokens)]
    for last in (*likely, *reply):
        if reasoner.is_reasoning_end_streaming(ids[: last + 1], ids[last : last + 1]):
            return last + 1
    return len(ids)


def make_scheduler(*, vllm_config: Any, **kwargs: Any) -> SchedulerInterface:
    """Our scheduler of the kind that vLLM would take for such an engine."""
    is_async = vllm_config.scheduler_config.async_scheduling
    return (AsyncGrammarScheduler if is_async else GrammarScheduler)(vllm_config=vllm_config, **kwargs)


SCHEDULER_CLS = f"{make_scheduler.__module__}.{make_scheduler.__qualname__}"
"""The setting `scheduler_cls`, by which vLLM imports it."""
