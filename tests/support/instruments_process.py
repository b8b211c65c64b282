"""One rank of an actor whose update measures itself: its metrics beside those of a forward pass, or what they cost.

Run as `python -c "from support.instruments_process import main; main()" CASE.json RANK`; rank 0 writes what it found
into `<out>`. By hand, on one rank: `python -m support.instruments_process MODEL ROUNDS TOKENS` prints medians of
updates without instruments, with them, with verl's `actor.calculate_entropy`, and of the forward pass they replace,
taken in turns.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from verl.trainer.config import CheckpointConfig
from verl.trainer.distillation import distillation_ppo_loss
from verl.utils import tensordict_utils as tu
from verl.workers.config import DistillationConfig, DistillationLossConfig, McoreActorConfig, TrainingWorkerConfig
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

from seamless_verl.config.schema import CorrectionConfig
from seamless_verl.platform.engine import register_engines
from seamless_verl.trainer.finite_updates import FiniteUpdates
from seamless_verl.trainer.instruments import of_update
from seamless_verl.trainer.losses import UPDATE, CorrectedUpdates, update_numbers, weighs_sessions
from seamless_verl.trainer.token_mask import agreement_of
from support.megatron_process import configs_of

PROMPT, ROWS = 3, 4


def batch(rank: int, per_rank: int, lengths: list[int], vocabulary: int, **asked: Any) -> Any:
    """This rank's rows, the same for the same arguments. A token in five is under a grammar, one in seven masked."""
    torch.manual_seed(7)
    columns: dict[str, list[torch.Tensor]] = {}
    for row, length in enumerate(lengths):
        ids, place = torch.randint(vocabulary, (PROMPT + length,)), torch.arange(length)
        mask = (place % 7 != 3).long()
        numbers = {"prompts": ids[:PROMPT], "responses": ids[PROMPT:], "input_ids": ids, "response_mask": mask}
        numbers |= {"position_ids": torch.arange(len(ids)), "advantages": torch.randn(length)}
        numbers |= {"loss_mask": torch.cat([torch.zeros(PROMPT, dtype=torch.long), mask])}
        numbers |= {"old_log_probs": -torch.rand(length) - 5, "grammar": (place % 5 == 2).long()}
        numbers |= {"weight_version": torch.zeros(length, dtype=torch.long)}
        numbers["teacher_ids"] = torch.stack([(ids + 1) % vocabulary, (ids + 2) % vocabulary], dim=-1)
        numbers["teacher_logprobs"] = torch.tensor([0.7, 0.2]).log().expand(len(ids), 2).clone()
        if row // per_rank == rank:
            for name, values in numbers.items():
                columns.setdefault(name, []).append(values)
    nested = {name: torch.nested.as_nested_tensor(values, layout=torch.jagged) for name, values in columns.items()}
    rows = len(lengths)
    return tu.get_tensordict(nested, {
        "mini_batch_size": rows, "global_batch_size": rows, "temperature": 0.7, "epochs": 1, **asked,
    })  # fmt: skip


def made_worker(case: dict[str, Any]) -> TrainingWorker:
    model, engine, optimizer = configs_of(case)
    worker = TrainingWorker(TrainingWorkerConfig(
        model_type="language_model", model_config=model, engine_config=engine, optimizer_config=optimizer,
        checkpoint_config=CheckpointConfig(save_contents=["model"]),
    ))  # fmt: skip
    sizes = {"ppo_mini_batch_size": ROWS, "ppo_micro_batch_size_per_gpu": 1, "rollout_n": 1}
    config = McoreActorConfig(strategy="megatron", policy_loss={"loss_mode": "dppo_tv"}, **sizes)
    FiniteUpdates(worker, "actor")
    loss = partial(ppo_loss, config=config)
    if case.get("distils"):
        of_teacher = DistillationLossConfig(
            loss_mode="forward_kl_topk", topk=2, use_task_rewards=False, use_policy_gradient=False
        )
        loss = partial(distillation_ppo_loss, config, DistillationConfig(distillation_loss=of_teacher))
    worker.set_loss_fn(weighs_sessions(CorrectedUpdates(worker).correcting(loss)))
    worker.reset()
    return worker


def asked(*, measures: bool) -> dict[str, Any]:
    return {UPDATE: update_numbers(CorrectionConfig(), 1, update=0, updates=1, measures=measures)}


def main() -> None:
    case, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    worker = started(case, rank)
    dp_rank, share = worker.engine.get_data_parallel_rank(), ROWS // worker.engine.get_data_parallel_size()
    given = partial(batch, dp_rank, share, case["lengths"], 250)
    if case.get("distils"):
        of_logits = {"distillation_use_topk": True, "distillation_only": True}
        outputs = [worker.train_mini_batch(given(**of_logits, **asked(measures=True))) for _ in range(case["distils"])]
        if worker.engine.is_mp_src_rank_with_outputs():
            Path(case["out"], f"rank{rank}.json").write_text(json.dumps([reduced(output) for output in outputs]))
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        return
    seen = by_forward_pass(worker, given(calculate_entropy=True, compute_loss=False))
    output = worker.train_mini_batch(given(**asked(measures=True)))
    again = worker.train_mini_batch(given(**asked(measures=False)))
    if worker.engine.is_mp_src_rank_with_outputs():
        found = {"expected": seen, "metrics": reduced(output), "unmeasured": reduced(again)}
        Path(case["out"], f"rank{rank}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def started(case: dict[str, Any], rank: int) -> TrainingWorker:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(case["world"]), DIST_INIT_METHOD=f"file://{case['out']}/store")
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
    torch.set_num_threads(1)
    register_engines()
    return made_worker(case)


def reduced(output: Any) -> dict[str, float]:
    """As verl's trainer reduces an actor's metrics, and ours names them."""
    from verl.utils.metric import reduce_metrics
    from verl.utils.py_functional import rename_dict

    found = of_update(reduce_metrics(rename_dict(tu.get(output, "metrics"), "actor/")))
    return {name: float(value) for name, value in found.items()}


def by_forward_pass(worker: TrainingWorker, data: Any) -> list[Any]:
    """What a forward pass finds of the trained tokens of all ranks, with the sum and number of their entropies."""
    output = worker.infer_batch(data)
    if not worker.engine.is_mp_src_rank_with_outputs():
        return []
    mask = data["response_mask"].to_padded_tensor(0).bool()
    own = no_padding_2_padding(output["log_probs"], data)[mask]
    entropy = no_padding_2_padding(output["entropy"], data)[mask]
    theirs, labels = (data[name].to_padded_tensor(0)[mask] for name in ("old_log_probs", "grammar"))
    columns = [own.float(), theirs, labels, entropy.float()]
    parts: list[Any] = [None] * worker.engine.get_data_parallel_size()
    torch.distributed.all_gather_object(parts, columns, group=worker.engine.get_data_parallel_group())
    own, theirs, labels, entropy = (torch.cat([part[i] for part in parts]) for i in range(4))
    correlation = torch.corrcoef(torch.stack([own.exp(), theirs.exp()]))[0, 1]
    return [agreement_of(own, theirs, labels), float(entropy.mean()), float(correlation)]


def cost(model: str, rounds: int, tokens: int) -> None:
    """Prints the medians of the processor's time, of four rows of so many tokens in two micro-batches."""
    with tempfile.TemporaryDirectory() as folder:
        worker = started({"model": model, "out": folder, "world": 1, "tokens": 2 * tokens + 20, "lr": 1e-6}, 0)
        vocabulary = json.loads(Path(model, "config.json").read_text())["vocab_size"]
        given = partial(batch, 0, ROWS, [tokens] * ROWS, vocabulary)
        arms = {
            "without": lambda: worker.train_mini_batch(given(**asked(measures=False))),
            "with instruments": lambda: worker.train_mini_batch(given(**asked(measures=True))),
            "with verl's calculate_entropy": lambda: worker.train_mini_batch(
                given(calculate_entropy=True, **asked(measures=False))
            ),
            "the forward pass": lambda: worker.infer_batch(given(calculate_entropy=True, compute_loss=False)),
        }
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        for number in range(rounds + 1):
            for name, arm in arms.items():
                begin = time.process_time()
                arm()
                seconds[name] += [time.process_time() - begin] if number else []
        base = median(seconds["without"])
        for name, values in seconds.items():
            middle = median(values)
            sys.stdout.write(f"{name:32} {middle:8.3f} s  {100 * (middle / base - 1):+6.1f}%  {len(values)} updates\n")
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    cost(sys.argv[1], *map(int, sys.argv[2:]))
