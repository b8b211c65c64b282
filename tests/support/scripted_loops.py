"""An agent loop worker of ours or verl's, whose loops have the outcomes that a test sets, and what it writes."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import transfer_queue
from verl.experimental.agent_loop import agent_loop as verls
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

from seamless_verl.agent_loops.group import warned
from seamless_verl.agent_loops.prompt_builders import PromptBuilders
from seamless_verl.agent_loops.queue_writer import QueueWriter
from seamless_verl.config.schema import SeamlessConfig
from seamless_verl.data_plane.finished_sessions import HandedNote
from seamless_verl.data_plane.group_notifier import GroupEnd

KEPT = {
    "sampling": "a column of the data",
    "global_steps": 7,
    "raw_prompt": [{"role": "user", "content": "hm"}],
    "data_source": "a",
}
SCRIPT: dict[int, Any] = {}
"""The outcomes of a test's sessions, by number."""


class Scripted:
    """An agent loop with the outcome that the test sets."""

    def __init__(self, tag: str = "", **kwargs: Any) -> None:
        self.tag, self.kwargs = tag, kwargs

    async def run(self, sampling_params: dict[str, Any], *, session_id: int, **kwargs: Any) -> Any:
        if self.tag != "awaits nothing":
            await asyncio.sleep(0)
        outcome = SCRIPT[session_id]
        if isinstance(outcome, BaseException):
            raise outcome
        return await outcome() if callable(outcome) else outcome


class Put:
    """Records puts in order; `tags` has those of single keys."""

    def __init__(self) -> None:
        self.batches: list[dict[str, Any]] = []
        self.tags: list[tuple[str, str]] = []

    async def batch(self, **kwargs: Any) -> None:
        await asyncio.sleep(0)
        self.batches.append(kwargs)

    async def single(self, *, key: str, partition_id: str, tag: dict[str, Any]) -> None:
        self.tags.append((key, tag["status"]))

    def rows(self) -> dict[str, tuple[dict[str, Any], Any]]:
        return {
            key: (batch["tags"][i], {name: batch["fields"][name][i] for name in batch["fields"].keys(True)})
            for batch in self.batches
            for i, key in enumerate(batch["keys"])
        }


class Plane:
    """Records acknowledgements, with the number of batches put before each or "dropped", and ended groups."""

    def __init__(self, put: Put) -> None:
        self.put, self.events = put, []  # type: ignore[var-annotated]
        self.ends: list[GroupEnd] = []
        self.notes: dict[str, HandedNote] = {}
        self.notify_group_ended = SimpleNamespace(remote=self._notified)
        self.acknowledge = SimpleNamespace(remote=self._acknowledged)

    def _acknowledged(self, session_id: str, kept: bool, note: HandedNote) -> Any:
        assert note.uid == "u"
        self.notes[session_id] = note
        self.events.append((session_id, len(self.put.batches) if kept else "dropped"))
        return done(None)

    def _notified(self, end: GroupEnd) -> Any:
        self.events.append(("group ended", end.error))
        self.ends.append(end)
        return done(None)


def done(value: Any) -> Any:
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    future.set_result(value)
    return SimpleNamespace(future=lambda: future)


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> Put:
    put = Put()
    monkeypatch.setattr(transfer_queue, "async_kv_batch_put", put.batch)
    monkeypatch.setattr(transfer_queue, "async_kv_put", put.single)
    return put


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, Any]]:
    target = {"_target_": f"{__name__}.{Scripted.__name__}", "name": "scripted", "tag": "hm"}
    monkeypatch.setitem(verls._agent_loop_registry, "scripted", target)
    warned.clear()
    yield SCRIPT
    SCRIPT.clear()


def worker(kind: Any, put: Put, n: int = 1) -> Any:
    """A worker without a reward model, whose model takes text only."""
    made = object.__new__(kind)
    rollout = SimpleNamespace(n=n, val_kwargs=SimpleNamespace(n=n))
    made.config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout), data=None)
    made.reward_loop_worker_handles, made.distillation_enabled, made.processor = None, False, None
    made.mm_processor_kwargs = None
    made.llm_client = made.tokenizer = made.hf_model_type = made.dataset_cls = None
    made.tools, made.loops, made.plane, made.writer = [], {}, Plane(put), QueueWriter()
    made.running, made.builders = {}, PromptBuilders()
    made.seamless = SeamlessConfig()
    return made


def output(response: list[int], reward: float | None = 1.0, **more: Any) -> AgentLoopOutput:
    extra = {"min_global_steps": 3, "max_global_steps": 4, "reward_extra_info": {"acc": reward}, **more}
    return AgentLoopOutput(
        prompt_ids=[5, 6],
        response_ids=response,
        response_mask=[1] * len(response),
        response_logprobs=[-0.5] * len(response),
        reward_score=reward,
        num_turns=2,
        metrics=AgentLoopMetrics(),
        extra_fields=extra,
    )


def run_prompt(made: Any, validate: bool = False, **columns: Any) -> None:
    trajectory = {"step": 7, "sample_index": 0, "rollout_n": 0, "validate": validate}
    prompt = {"uid": "u", "agent_name": "scripted", **KEPT, **columns}
    asyncio.run(made._run_prompt(prompt, {}, trajectory=trajectory))
