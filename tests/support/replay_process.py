"""One rank of a Megatron engine that replays routes: log-probabilities and updates, as an actor computes them.

Run as `python -c "from support.replay_process import main; main()" CASE.json RANK`. The case has, beside that of
`megatron_process`, `routes`: a file with those of each sequence, int [N - 1, layers, experts]. The routers' choices are
written down by `routes_seen`.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.utils.distributed import initialize_global_process_group_ray
from verl.workers.config.engine import EngineRouterReplayConfig
from verl.workers.engine import EngineRegistry
from verl.workers.utils.losses import sft_loss

from seamless_verl.platform.engine import register_engines
from seamless_verl.trainer.flipped_routes import FlippedRoutes
from support.data.routes_seen import watch
from support.megatron_process import batch_of, configs_of, local_share


def replaying(case: dict[str, Any]) -> Any:
    model, engine, optimizer = configs_of(case)
    object.__setattr__(engine, "router_replay", EngineRouterReplayConfig(mode="R3"))
    return EngineRegistry.new(
        model_type="language_model", backend="megatron", model_config=model, engine_config=engine,
        optimizer_config=optimizer, checkpoint_config=CheckpointConfig(),
    )  # fmt: skip


def main() -> None:
    case, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(case["world"]), DIST_INIT_METHOD=f"file://{case['out']}/store")
    torch.set_num_threads(1)
    register_engines()
    initialize_global_process_group_ray()
    engine = replaying(case)
    engine.initialize()
    watch(Path(case["out"]))
    worker = SimpleNamespace(engine=engine, train_mini_batch=None)
    FlippedRoutes(worker)
    routes = torch.load(case["routes"])

    def batch(*, replayed: bool = True) -> Any:
        data = batch_of(local_share(case["sequences"]))
        data["response_mask"] = data["loss_mask"]
        if replayed:
            rows = [torch.cat([row, torch.zeros_like(row[:1])]) for row in local_share(routes)]
            data["routed_experts"] = torch.nested.as_nested_tensor(
                [r.to(torch.int16) for r in rows], layout=torch.jagged
            )
        tu.assign_non_tensor_data(data, "enable_routing_replay", replayed)
        return data

    result: dict[str, Any] = {"logprobs": []}
    for replayed in (False, True):
        with engine.eval_mode(), torch.no_grad():
            out = engine.infer_batch(batch(replayed=replayed), loss_function=None)
        if engine.is_mp_src_rank_with_outputs():
            result["logprobs"].append([row.float() for row in out["model_output"]["log_probs"].unbind()])
    with engine.train_mode():
        out = engine.train_batch(batch(), loss_function=partial(sft_loss, config=None))
    if engine.is_mp_src_rank_with_outputs():
        result["routes_flipped"] = out["metrics"]["routes_flipped"][0]
    torch.save(result, f"{case['out']}/rank{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
