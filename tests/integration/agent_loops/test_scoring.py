"""What reward workers get of a session is what verl's own agent loop workers send."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.integration
LONG = 40_000  # tokens: arrays of such a length are shared with the sender, and cannot be written


def session(length: int = 3, extra: dict[str, Any] | None = None) -> Any:
    """As verl's worker makes one of two sequences."""
    import torch
    from verl import DataProto

    tensors = {"prompts": torch.tensor([[5, 6], [7, 0]]), "responses": torch.arange(2 * length).reshape(2, length)}
    tensors["attention_mask"] = torch.ones(2, 2 + length, dtype=torch.int64)
    tensors["halves"] = torch.full((2, length), 0.5)
    others = {
        "data_source": np.array(["sums"] * 2),
        "reward_model": np.array([{"ground_truth": "12", "style": "rule"}] * 2),
        "tool_extra_fields": np.array([{"turns": [1]}, {}], dtype=object),
        "extra_info": np.array([{} if extra is None else extra] * 2),
    }
    return DataProto.from_dict(tensors=tensors, non_tensors=others, meta_info={"step": 7})


def test_ray_keeps_no_record_of_a_score_or_a_generation() -> None:
    from seamless_verl.agent_loops.scoring import ScoreMethod
    from seamless_verl.data_plane.actor import DataPlane

    class Method:
        def options(self, **given: Any) -> dict[str, Any]:
            return given

    assert ScoreMethod(Method()).method == {"enable_task_events": False}
    assert DataPlane.generate.__ray_enable_task_events__ is False  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def worker() -> Iterator[Any]:
    """A handle of an actor that writes into what it gets, as reward managers do."""
    import ray

    from seamless_verl.agent_loops.scoring import reward_workers

    @ray.remote
    class Worker:
        def __init__(self) -> None:
            self.seen = list[dict[str, Any]]()

        async def compute_score(self, data: Any) -> dict[str, Any]:
            before = {name: tensor.clone() for name, tensor in data.batch.items()}
            others = deepcopy({name: values.tolist() for name, values in data.non_tensor_batch.items()})
            for tensor in data.batch.values():
                tensor += 1
            self.seen.append(data[-1:][0].non_tensor_batch["extra_info"])
            self.seen[-1]["session"] = len(self.seen)
            if len(data) == 1:
                raise ValueError("no")
            sizes = len(data), data.batch.batch_size
            return {"type": type(data).__name__, "batch": before, "others": others, "sizes": sizes, "of": self.seen}

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield (reward_workers([Worker.remote()]) or [None])[0]
    ray.shutdown()


@pytest.mark.parametrize("length", [3, LONG])
def test_a_reward_worker_gets_verls_batch_and_may_write_into_it(worker: Any, length: int) -> None:
    import ray
    import torch

    data = session(length)
    found = ray.get(worker.compute_score.remote(data))
    assert found["type"] == "DataProto" and found["sizes"] == (2, data.batch.batch_size)
    assert set(found["batch"]) == set(data.batch.keys())
    for name, tensor in data.batch.items():
        assert found["batch"][name].dtype == tensor.dtype and torch.equal(found["batch"][name], tensor)
    assert found["others"] == {name: values.tolist() for name, values in data.non_tensor_batch.items()}


def test_sessions_of_a_prompt_share_nothing_that_is_written(worker: Any) -> None:
    """verl gives all of them the prompt's own `extra_info`, and each of its reward managers writes into it."""
    import ray

    shared = {"index": 3}
    sent = [worker.compute_score.remote(session(extra=shared)) for _ in range(3)]
    seen = ray.get(sent)[-1]["of"][-3:]
    assert len({one["session"] for one in seen}) == 3 and shared == {"index": 3}


def test_what_a_reward_function_raises_is_raised_as_by_verl(worker: Any) -> None:
    import ray

    with pytest.raises(ValueError, match="no"):
        ray.get(worker.compute_score.remote(session()[1:]))


def test_without_reward_workers_the_trainer_scores() -> None:
    from seamless_verl.agent_loops.scoring import reward_workers

    assert reward_workers(None) is None
