"""verl's Megatron engine, twice from the same weights: with what sequences share computed once, and without.

Run as `python -c "from support.sharing_process import main; main()" CASE.json RANK`. It writes what both computed to
`<out>/rank<r>.pt`: outputs of a forward pass; losses, gradient norms, weights and seconds of updates with verl's loss.
"""

from __future__ import annotations

import random
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from verl.utils import tensordict_utils as tu
from verl.workers.config import McoreActorConfig, McoreCriticConfig
from verl.workers.utils.losses import ppo_loss, value_loss

from seamless_verl.shared_prefixes import forward
from support.megatron_process import begin_alone, build_engine


def group(
    prompts: list[int], samples: int, answer: int, ids: int, header: int = 0
) -> list[tuple[list[int], list[int]]]:
    """Samples of prompts of these lengths behind a common header, each with an answer of `answer` tokens."""
    rng = random.Random(5)
    begin = [rng.randrange(ids) for _ in range(header)]
    found = []
    for length in prompts:
        prompt = begin + [rng.randrange(ids) for _ in range(length)]
        answers = [[rng.randrange(ids) for _ in range(answer)] for _ in range(samples)]
        found += [(prompt, one) for one in answers]
    return found


def batch_of(rows: list[tuple[list[int], list[int]]], tokens: int, of_all_ranks: int) -> Any:
    """The columns of an update, with advantages of either sign, logprobs of a reference, and tokens that are not
    trained, such as stale ones; all ranks together have `of_all_ranks` rows."""
    torch.manual_seed(7)
    columns: dict[str, list[torch.Tensor]] = {}
    for prompt, answer in rows:
        ids = torch.tensor(prompt + answer)
        mask = (torch.rand(len(answer)) < 0.8).long()
        mask[0] = 1
        row = {
            "input_ids": ids, "prompts": ids[: len(prompt)], "responses": ids[len(prompt) :], "response_mask": mask,
            "position_ids": torch.arange(len(ids)), "loss_mask": torch.cat([torch.zeros(len(prompt)).long(), mask]),
            "advantages": torch.randn(len(answer)), "old_log_probs": -5 - torch.rand(len(answer)),
            "ref_log_prob": -5 - torch.rand(len(answer)),
            "values": torch.randn(len(answer)), "returns": torch.randn(len(answer)),
        }  # fmt: skip
        for name, values in row.items():
            columns.setdefault(name, []).append(values)
    nested = {name: torch.nested.as_nested_tensor(values, layout=torch.jagged) for name, values in columns.items()}
    none = {"multi_modal_inputs": [{} for _ in rows]}  # a column of every row in a run
    options = {"use_remove_padding": True, "use_dynamic_bsz": True, "max_token_len_per_gpu": tokens}
    options |= {"use_fused_kernels": False, "temperature": 1.0, "pad_mode": "no_padding", "calculate_entropy": True}
    return tu.get_tensordict(
        nested | none, options | {"global_batch_size": of_all_ranks, "calculate_sum_pi_squared": True}
    )


def weights_of(engine: Any) -> dict[str, torch.Tensor]:
    return {name: w.detach().float().clone() for name, w in engine.module[0].named_parameters()}


def restore(engine: Any, weights: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in engine.module[0].named_parameters():
            parameter.copy_(weights[name])


def forward_pass(engine: Any, data: Any) -> dict[str, list[torch.Tensor]]:
    """What the last stage of a pipeline has of each sequence; empty for the others."""
    with engine.eval_mode(), torch.no_grad():
        output = engine.infer_batch(data, loss_function=None)
    outputs = output["model_output"] if engine.is_mp_src_rank_with_outputs() else {}
    return {name: [row.float() for row in values.unbind()] for name, values in outputs.items()}


class KeptBytes(saved_tensors_hooks):  # type: ignore[misc]
    """In the block, counts the bytes that the backward pass keeps: each storage once, and no parameter's."""

    def __init__(self, engine: Any) -> None:
        self.parameters = {w.untyped_storage().data_ptr() for w in engine.module[0].parameters()}
        self.kept: dict[int, Any] = {}
        super().__init__(self.pack, lambda tensor: tensor)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_nested:  # which has no storage of its own
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self.parameters:
                self.kept[storage.data_ptr()] = storage
        return tensor

    def bytes(self) -> int:
        return sum(storage.nbytes() for storage in self.kept.values())


def update(engine: Any, data: Any, loss: Any, *, counts: bool) -> dict[str, Any]:
    kept = KeptBytes(engine)
    begun = time.perf_counter()
    with engine.train_mode(), kept if counts else nullcontext():
        output = engine.train_batch(data, loss_function=loss)
    found = {"seconds": time.perf_counter() - begun, "weights": weights_of(engine), "kept": kept.bytes()}
    if engine.is_mp_src_rank_with_outputs():
        metrics = output["metrics"]
        found |= {"loss": sum(output["loss"]), "gradient": float(metrics["grad_norm"]), "metrics": metrics}
    return found


def from_behind(of_rows: Any, gpt: Any, forest: Any, device: Any) -> Any:
    """As if the model counted positions otherwise."""
    return of_rows(gpt, replace(forest, positions=forest.positions[::-1].copy()), device)


def main() -> None:
    case = begin_alone(*sys.argv[1:])
    sizes = {"ppo_mini_batch_size": 8, "ppo_micro_batch_size_per_gpu": 8, "rollout_n": 1}
    loss = partial(
        ppo_loss, config=McoreActorConfig(strategy="megatron", entropy_coeff=0.01, use_kl_loss=True, **sizes)
    )
    if case.get("model_type") == "value_model":
        loss = partial(value_loss, config=McoreCriticConfig(strategy="megatron", **sizes))
    rows = group(case["prompts"], case["samples"], case["answer"], case["ids"], case.get("header", 0))
    if case.get("shuffled"):
        random.Random(9).shuffle(rows)
    names = ("alone", "shared", "permuted")[: case.get("engines", 2)]
    engines: dict[str, Any] = {name: build_engine(case) for name in names}
    found: dict[str, Any] = {name: {"updates": []} for name in engines}
    for engine in engines.values():
        engine.initialize()
    found["shared"]["obstacle"] = engines["shared"].share_prefixes()
    for engine in engines.values():
        restore(engine, weights_of(engines["alone"]))
    if case.get("misread"):
        forward.positions_of_rows = partial(from_behind, forward.positions_of_rows)
    rank, size = engine.get_data_parallel_rank(), len(rows) // engine.get_data_parallel_size()
    data = partial(batch_of, rows[rank * size :][:size], case["tokens"], len(rows))
    orders = {name: [*range(size)] for name in engines}
    random.Random(3).shuffle(orders.get("permuted", []))
    for name, engine in engines.items():
        found[name]["outputs"] = forward_pass(engine, data())
    for _ in range(case["updates"]):  # one after the other, so that what else the machine does meets both
        for name, engine in engines.items():
            rows_of_rank = tu.index_select_tensor_dict(data(), orders[name])
            found[name]["updates"].append(update(engine, rows_of_rank, loss, counts=case.get("counts", False)))
    found["shared"]["sharing"] = engines["shared"].sharing
    torch.save(found, f"{case['out']}/rank{torch.distributed.get_rank()}.pt")
    torch.distributed.destroy_process_group()
