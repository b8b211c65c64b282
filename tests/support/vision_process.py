"""One rank of a vision model that verl's FSDP2 engine trains for two updates on rows of sessions with images.

Run as `python -c "from support.vision_process import main; main()" CASE.json RANK`; each rank writes what it found to
`<out>/rank<r>.json`.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import (
    FSDPActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss

from seamless_verl.platform.process_group import default_to_gloo, share_gloo_devices
from support.vision_rows import BLUE, RED, vision_rows

STRATEGY, SHOWN = "fsdp2", ((RED, BLUE), (BLUE, RED), (RED, RED), (BLUE, BLUE))
COLUMNS = ("prompts", "responses", "input_ids", "position_ids", "response_mask", "rollout_log_probs")


def batch(folder: Path, rank: int, world: int) -> Any:
    """This rank's share of one row for each pair of pictures."""
    rows = vision_rows(folder, SHOWN)
    columns: dict[str, list[torch.Tensor]] = {}
    for row in (mine := rows[rank::world]):
        given = {name: row.columns[name] for name in COLUMNS}
        size, context = len(given["responses"]), torch.zeros(len(given["prompts"]), dtype=torch.long)
        given |= {"loss_mask": torch.cat([context, given["response_mask"]]), "advantages": torch.ones(size)}
        given |= {"old_log_probs": given["rollout_log_probs"].float(), "returns": torch.zeros(size)}
        for name, values in given.items():
            columns.setdefault(name, []).append(values)
    nested: dict[str, Any] = {
        name: torch.nested.as_nested_tensor(values, layout=torch.jagged) for name, values in columns.items()
    }
    nested["multi_modal_inputs"] = [row.columns["multi_modal_inputs"] for row in mine]
    sizes = {"mini_batch_size": len(rows), "global_batch_size": len(rows), "epochs": 1, "temperature": 1.0}
    return tu.get_tensordict(nested, sizes | {"use_remove_padding": False, "pad_token_id": 0})


def made_worker(folder: Path) -> Any:
    if "cpu" not in EngineRegistry._engines["language_model"][STRATEGY]:
        EngineRegistry.register(model_type="language_model", backend=STRATEGY, device="cpu")(FSDPEngineWithLMHead)
    tokens = {"max_token_len_per_gpu": 4096, "infer_max_token_len_per_gpu": 4096}
    engine = FSDPEngineConfig(
        strategy=STRATEGY, use_torch_compile=False, model_dtype="fp32", dtype="float32", use_dynamic_bsz=True, **tokens
    )
    attention = {"attn_implementation": "sdpa"}
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(path=str(folder), use_remove_padding=False, override_config=attention),
            engine_config=engine,
            optimizer_config=FSDPOptimizerConfig(lr=1e-3, total_training_steps=10),
            checkpoint_config=CheckpointConfig(save_contents=["model"]),
        )
    )
    sizes = {"ppo_mini_batch_size": len(SHOWN), "ppo_micro_batch_size_per_gpu": 1, "rollout_n": 1}
    worker.set_loss_fn(partial(ppo_loss, config=FSDPActorConfig(strategy=STRATEGY, **sizes)))
    worker.reset()
    return worker


def weights_of(worker: Any) -> dict[str, torch.Tensor]:
    return {name: weight.to_local().detach().clone() for name, weight in worker.engine.module.named_parameters()}


def main() -> None:
    case, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    world, folder = case["world"], Path(case["model"])
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), DIST_INIT_METHOD=f"file://{case['out']}/store")
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0", LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    default_to_gloo()
    share_gloo_devices()
    worker, data = made_worker(folder), batch(folder, rank, world)
    before, steps = weights_of(worker), []
    for _ in range(2):
        output = worker.train_mini_batch(data.clone())
        metrics = {} if output is None else tu.get(output, "metrics")
        steps.append({name: float(metrics[name][0]) for name in ("loss", "grad_norm") if name in metrics})
    moved = [name for name, weight in weights_of(worker).items() if not torch.equal(weight, before[name])]
    Path(case["out"], f"rank{rank}.json").write_text(json.dumps({"steps": steps, "moved": moved}))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
