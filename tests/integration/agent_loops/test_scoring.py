"""What reward workers get of a session is what verl's own agent loop workers send, and each session gets its score."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.integration


def session(place: int = 0) -> Any:
    """As verl's worker makes one of two sequences."""
    import torch
    from verl import DataProto

    tensors = {"prompts": torch.tensor([[5, 6], [7, 0]]), "responses": torch.arange(6).reshape(2, 3) + place}
    tensors["attention_mask"] = torch.ones(2, 5, dtype=torch.int64)
    tensors["halves"] = torch.full((2, 3), 0.5)
    others = {
        "data_source": np.array(["sums"] * 2),
        "reward_model": np.array([{"ground_truth": "12", "style": "rule"}] * 2),
        "tool_extra_fields": np.array([{"turns": [1]}, {}], dtype=object),
    }
    return DataProto.from_dict(tensors=tensors, non_tensors=others, meta_info={"place": place})


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    import ray

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


def handle(score: Callable[[Any], Any]) -> Any:
    """Of a reward worker in this process, whose reward function is this coroutine; `calls` has how many each had."""
    from seamless_verl.agent_loops.scoring import SeamlessRewardLoopWorker

    worker = object.__new__(SeamlessRewardLoopWorker)
    worker.compute_score, calls = score, list[int]()

    async def remote(sent: list[Any]) -> Any:
        calls.append(len(sent))
        return await worker.score_sessions([one.data for one in sent])

    return SimpleNamespace(score_sessions=SimpleNamespace(remote=remote), calls=calls)


def scorer(made: Any) -> Any:
    from seamless_verl.agent_loops.scoring import reward_workers

    (worker,) = reward_workers([made]) or ()
    return worker.compute_score


def test_a_reward_worker_gets_verls_batch(cluster: Any) -> None:
    import torch

    from seamless_verl.agent_loops.scoring import SentSession

    @cluster.remote
    class Worker:
        async def score_sessions(self, sessions: list[Any]) -> list[dict[str, Any]]:
            for one in sessions:
                one.batch["responses"] += 0  # as if it were its own
            return [{"type": type(one).__name__, "data": SentSession(one)} for one in sessions]

    async def scores(sent: list[Any]) -> list[Any]:
        method = scorer(Worker.remote())
        return await asyncio.gather(*map(method.remote, sent))

    sent = [session(), session(1)[1:], session(2)]
    for data, result in zip(sent, asyncio.run(scores(sent)), strict=True):
        found = result["data"]
        assert result["type"] == "DataProto" and len(found) == len(data) and found.meta_info == data.meta_info
        assert found.batch.batch_size == data.batch.batch_size and set(found.batch.keys()) == set(data.batch.keys())
        for name, tensor in data.batch.items():
            assert found.batch[name].dtype == tensor.dtype and torch.equal(found.batch[name], tensor)
        for name, values in data.non_tensor_batch.items():
            assert found.non_tensor_batch[name].tolist() == values.tolist()
        assert len(found[-1:]) == 1  # as reward managers take the last sequence


async def test_sessions_that_end_together_are_one_call_and_one_that_fails_fails_alone() -> None:
    from seamless_verl.agent_loops.scoring import RewardFailedError

    class OddError(Exception):
        def __reduce__(self) -> Any:
            raise TypeError("cannot be sent")

    async def score(data: Any) -> dict[str, Any]:
        await asyncio.sleep(0)
        if data.meta_info["place"] == 1:
            raise OddError("no")
        return {"reward_score": float(data.meta_info["place"])}

    made = handle(score)
    method = scorer(made)
    first, failing, last = await asyncio.gather(*(method.remote(session(i)) for i in range(3)), return_exceptions=True)
    assert made.calls == [3]
    assert (first, last) == ({"reward_score": 0.0}, {"reward_score": 2.0})
    assert isinstance(failing, RewardFailedError) and str(failing) == "OddError: no"
    assert "test_scoring.py" in failing.__notes__[0]


async def test_a_slow_function_makes_no_session_wait_for_another_ones_score(monkeypatch: pytest.MonkeyPatch) -> None:
    from seamless_verl.agent_loops import scoring

    monkeypatch.setattr(scoring, "SLOW_S", 0.0)  # each call is slow
    released = asyncio.Event()

    async def score(data: Any) -> dict[str, Any]:
        if data.meta_info["place"] == 1:
            await released.wait()
        return {"reward_score": 1.0}

    made = handle(score)
    method = scorer(made)
    await method.remote(session())
    held, *others = [method.remote(session(i)) for i in range(1, 4)]
    assert [await one for one in others] == [{"reward_score": 1.0}] * 2
    assert made.calls == [1, 1, 1, 1] and not held.done()
    released.set()
    await held
    monkeypatch.setattr(scoring, "SLOW_S", 3600.0)  # and none is
    await method.remote(session())
    await asyncio.gather(*(method.remote(session()) for _ in range(2)))
    assert made.calls[4:] == [1, 2]


async def test_a_worker_that_is_gone_is_an_error_of_each_session() -> None:
    def gone(sent: list[Any]) -> None:
        raise ConnectionError("gone")

    method = scorer(SimpleNamespace(score_sessions=SimpleNamespace(remote=gone)))
    ended = await asyncio.gather(method.remote(session()), method.remote(session()), return_exceptions=True)
    assert [type(one) for one in ended] == [ConnectionError] * 2


async def test_a_session_whose_caller_is_stopped_is_not_scored_and_disturbs_no_other() -> None:
    scored, begun, released = list[int](), asyncio.Event(), asyncio.Event()

    async def score(data: Any) -> dict[str, Any]:
        scored.append(data.meta_info["place"])
        if data.meta_info["place"] == 2:
            begun.set()
            await released.wait()
        return {"reward_score": 1.0}

    method = scorer(handle(score))
    early, kept, late = (method.remote(session(i)) for i in range(3))
    early.cancel()
    await begun.wait()
    late.cancel()
    released.set()
    assert await kept == {"reward_score": 1.0} and scored == [1, 2]


def test_without_reward_workers_the_trainer_scores() -> None:
    from seamless_verl.agent_loops.scoring import reward_workers

    assert reward_workers(None) is None
