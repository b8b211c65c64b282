"""How often an engine preempts a request because its KV cache is full, from vLLM's scheduler to its server.

vLLM counts preemptions for its own log alone, which verl turns off. Here the scheduler counts them, and sends what it
has not sent yet as `preempted_requests` of its statistics, a field that nothing else of vLLM reads.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.request import Request


class PreemptionCount(Scheduler):  # type: ignore[misc]
    """Owned state: the preemptions since the last statistics, but for those of a cache that is reset."""

    unsent = 0
    resetting = False

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        self.unsent += not self.resetting

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        self.resetting = True
        try:
            return bool(super().reset_prefix_cache(*args, **kwargs))
        finally:
            self.resetting = False

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        """vLLM's statistics, where it makes some, with our count; else some that have nothing but the count."""
        stats: SchedulerStats | None = super().make_stats(*args, **kwargs)
        if stats is None and self.unsent:
            stats = SchedulerStats()
        if stats is not None:
            stats.prefix_cache_stats.preempted_requests, self.unsent = self.unsent, 0
        return stats


class EnginePreemptions:
    """Counts what the engine's schedulers send, from when it is made."""

    def __init__(self, engine: AsyncLLM) -> None:
        self.total = 0
        self._update = engine.output_processor.update_scheduler_stats
        engine.output_processor.update_scheduler_stats = self._count

    def _count(self, stats: SchedulerStats | None) -> None:
        if stats is not None:
            self.total += stats.prefix_cache_stats.preempted_requests
        self._update(stats)
