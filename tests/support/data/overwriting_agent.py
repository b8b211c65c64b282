"""The agent `held`, and as many loads of a replica overwritten as a file says."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai_agent
import ray

OVERWRITTEN = "model.layers.1.mlp.down_proj"


async def run(task: dict[str, Any], endpoint: Any) -> float:
    if loads := taken():
        await ray.get_actor("vllm_server_1_0").collective_rpc.remote(overwrite_after_loads, args=(loads,))
    return await openai_agent.held(task, endpoint)


def taken() -> int:
    """The number, of the first that asks; then 0."""
    file = Path(os.environ["LOADS_OVERWRITTEN"])
    with suppress(FileNotFoundError):
        return int(file.rename(file.with_suffix(".taken")).read_text())
    return 0


def overwrite_after_loads(worker: Any, loads: int) -> None:
    """In the engine of replica-1, as by another process that writes into its memory."""
    worker = getattr(worker, "worker", worker)  # of vLLM's wrapper
    load, left = worker.update_weights_from_ipc, [loads]

    def load_and_overwrite(*args: Any, **kwargs: Any) -> None:
        load(*args, **kwargs)
        if left[0]:
            left[0] -= 1
            worker.model_runner.model.get_submodule(OVERWRITTEN).weight.data.zero_()

    worker.update_weights_from_ipc = load_and_overwrite
