"""The reward of held_reward.py; the number in a file is how many loads of a replica are overwritten from then on."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import held_reward

OVERWRITTEN = "model.layers.1.mlp.down_proj"


def compute_score(data_source: str, solution_str: str, ground_truth: str, **kwargs: Any) -> float:
    with suppress(FileNotFoundError):
        file = Path(os.environ["LOADS_OVERWRITTEN"])
        overwrite(int(file.rename(file.with_suffix(".taken")).read_text()))
    return held_reward.compute_score(data_source, solution_str, ground_truth, **kwargs)


def overwrite(loads: int) -> None:
    """In the engine of replica-1, as by another process that writes into its memory."""
    import overwriting_reward  # not by the name under which verl has imported this file: an engine does not know it
    import ray

    server = ray.get_actor("vllm_server_1_0")
    ray.get(server.collective_rpc.remote(overwriting_reward.overwrite_after_loads, args=(loads,)))


def overwrite_after_loads(worker: Any, loads: int) -> None:
    worker = getattr(worker, "worker", worker)  # of vLLM's wrapper
    load, left = worker.update_weights_from_ipc, [loads]

    def load_and_overwrite(*args: Any, **kwargs: Any) -> None:
        load(*args, **kwargs)
        if left[0]:
            left[0] -= 1
            worker.model_runner.model.get_submodule(OVERWRITTEN).weight.data.zero_()

    worker.update_weights_from_ipc = load_and_overwrite
