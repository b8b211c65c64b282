"""One rank of a model that verl's TrainingWorker trains with our guard, and with numbers that are not finite.

Run as `python -c "from support.finite_process import main; main()" CASE.json RANK`; every rank writes what it found to
`<out>/rank<r>.json`. Each fault is put behind everything that looks at scores: into a column, a loss, or a gradient.
The fault `masked` is that no token is to be trained.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import McoreActorConfig, McoreCriticConfig, TrainingWorkerConfig
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss, value_loss

from seamless_verl.config.schema import CorrectionConfig
from seamless_verl.errors import NotFiniteError
from seamless_verl.platform.engine import register_engines
from seamless_verl.trainer.finite_updates import FiniteUpdates, has_finite_weights
from seamless_verl.trainer.losses import UPDATE, CorrectedUpdates, update_numbers
from support.megatron_process import configs_of

PROMPT, LENGTHS = 3, (5, 9, 4, 7)
ROWS, BAD = len(LENGTHS), 1  # the row of a fault, the first of a micro-batch
LARGE = 1e30  # its square is no number of float32


def batch(fault: str, rank: int, per_rank: int, epochs: int = 1) -> Any:
    """This rank's rows, one of which has `fault` if it is a column's name."""
    torch.manual_seed(7)
    rows = range(rank * per_rank, (rank + 1) * per_rank)
    columns: dict[str, list[torch.Tensor]] = {}
    for row, length in enumerate(LENGTHS):
        numbers = {name: torch.randn(length) for name in ("advantages", "returns", "values", "old_log_probs")}
        numbers["old_log_probs"] = -numbers["old_log_probs"].abs() - 5
        numbers |= {"rollout_log_probs": numbers["old_log_probs"].clone(), "rm_scores": torch.zeros(length)}
        if row == BAD and fault in numbers:
            numbers[fault][2] = math.nan
        if row == BAD and fault == "large":
            numbers["advantages"], numbers["returns"] = (torch.full((length,), LARGE) for _ in range(2))
        ids = torch.randint(256, (PROMPT + length,))
        numbers |= {"prompts": ids[:PROMPT], "responses": ids[PROMPT:], "input_ids": ids}
        trained = torch.full((length,), int(fault != "masked"))
        numbers |= {"response_mask": trained, "position_ids": torch.arange(len(ids))}
        numbers["loss_mask"] = torch.cat([torch.zeros(PROMPT, dtype=torch.long), numbers["response_mask"]])
        numbers["weight_version"] = torch.zeros(length, dtype=torch.long)
        if row in rows:
            for name, values in numbers.items():
                columns.setdefault(name, []).append(values)
    nested = {name: torch.nested.as_nested_tensor(values, layout=torch.jagged) for name, values in columns.items()}
    keys = "\n".join(f"u{row}_0_0" for row in range(ROWS))
    numbers = update_numbers(CorrectionConfig(scale_lr=True), 1, update=0, updates=1)
    return tu.get_tensordict(nested, {
        "mini_batch_size": ROWS, "global_batch_size": ROWS, "temperature": 1.0, "seamless_keys": keys, UPDATE: numbers,
        "epochs": epochs,
    })  # fmt: skip


class Faults:
    """A loss function of verl's whose value is not finite for one sample while `fault` is `loss`."""

    def __init__(self, loss: Any) -> None:
        self.loss, self.fault = loss, ""

    def __call__(self, model_output: Any, data: Any, dp_group: Any = None) -> Any:
        value, metrics = self.loss(model_output=model_output, data=data, dp_group=dp_group)
        if self.fault == "loss" and any(len(row) == LENGTHS[BAD] for row in data["responses"].unbind()):
            value = value * math.nan
        return value, metrics


def made_worker(case: dict[str, Any]) -> tuple[Any, Faults]:
    model, engine, optimizer = configs_of(case)
    critic = case["critic"]
    worker = TrainingWorker(TrainingWorkerConfig(
        model_type="value_model" if critic else "language_model", model_config=model, engine_config=engine,
        optimizer_config=optimizer, checkpoint_config=CheckpointConfig(save_contents=["model", "optimizer", "extra"]),
    ))  # fmt: skip
    if case["guarded"]:
        FiniteUpdates(worker, "critic" if critic else "actor")
    sizes = {"ppo_mini_batch_size": ROWS, "ppo_micro_batch_size_per_gpu": 1, "rollout_n": 1}
    config = (McoreCriticConfig if critic else McoreActorConfig)(strategy="megatron", **sizes)
    faults = Faults(partial(value_loss if critic else ppo_loss, config=config))
    worker.set_loss_fn(faults if critic else CorrectedUpdates(worker).correcting(faults))
    worker.reset()
    return worker, faults


def state_of(worker: Any) -> list[torch.Tensor]:
    return [weight.detach().clone() for chunk in worker.engine.module for weight in chunk.parameters()]


def main() -> None:
    case, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    world = case["world"]
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), DIST_INIT_METHOD=f"file://{case['out']}/store")
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
    torch.set_num_threads(1)
    logging.basicConfig(format="%(message)s")
    register_engines()
    worker, faults = made_worker(case)
    if rank == 0:  # of all ranks, one has a gradient that is not finite
        weight = next(worker.engine.module[0].parameters())
        weight.register_hook(lambda gradient: gradient * (math.inf if faults.fault == "gradient" else 1))
    dp_rank, dp_size = worker.engine.get_data_parallel_rank(), worker.engine.get_data_parallel_size()
    found = []
    for fault in case["faults"]:
        before, faults.fault, error, metrics = state_of(worker), fault, "", {}
        try:
            output = worker.train_mini_batch(batch(fault, dp_rank, ROWS // dp_size, case.get("epochs", 1)))
            metrics = tu.get(output, "metrics") if output is not None else {}
        except NotFiniteError as caught:
            error = str(caught)
        after = state_of(worker)
        found.append({
            "moved": any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)),
            "finite": all(bool(weight.isfinite().all()) for weight in after),
            "skipped": metrics.get("skipped_updates_sum"),
            "error": error,
            "lr": worker.engine.optimizer.param_groups[0]["lr"],
            "weights": [float(weight.double().sum()) for weight in after],
        })  # fmt: skip
    looks = [has_finite_weights(worker.engine)]
    if rank == 0:
        next(worker.engine.module[0].parameters()).data.view(-1)[-1] = math.nan
    looks.append(has_finite_weights(worker.engine))
    Path(case["out"], f"rank{rank}.json").write_text(json.dumps({"updates": found, "looks": looks}))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
