"""One rank of a Megatron engine in its own process: log-probabilities, some updates, an HF export.

Run as `python -m support.megatron_process CASE.json RANK`; the case gives model, sizes, sequences and the
output folder. Every rank writes what it has to `<out>/rank<r>.pt`. Imported, it has loaded all that a rank needs.
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
from verl.utils.distributed import initialize_global_process_group_ray
from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
from verl.workers.engine import EngineRegistry
from verl.workers.utils.losses import sft_loss

import seamless_verl.platform.megatron.host_engines  # noqa: F401 - for those that are forked after it
from seamless_verl.platform.engine import register_engines
from seamless_verl.platform.megatron.adapt import multiply_bf16_in_fp32


def begin_alone(path: str, rank: str = "0") -> dict[str, Any]:
    """The case in the file; this process is a rank of its group, the only one if the case has no other `world`, on one
    core, with our engines."""
    case: dict[str, Any] = json.loads(Path(path).read_text())
    os.environ.update(RANK=rank, WORLD_SIZE=str(case.get("world", 1)), DIST_INIT_METHOD=f"file://{case['out']}/store")
    torch.set_num_threads(1)
    register_engines()
    initialize_global_process_group_ray()
    return case


def configs_of(case: dict[str, Any]) -> tuple[HFModelConfig, McoreEngineConfig, McoreOptimizerConfig]:
    transformer = dict(
        gradient_accumulation_fusion=False, masked_softmax_fusion=False, apply_rope_fusion=False,
        attention_backend="unfused", **case.get("transformer", {}),
    )  # fmt: skip
    engine_config = McoreEngineConfig(
        tensor_model_parallel_size=case.get("tp", 1), pipeline_model_parallel_size=case.get("pp", 1),
        expert_model_parallel_size=case.get("ep", 1), expert_tensor_parallel_size=case.get("etp"),
        sequence_parallel=True, vanilla_mbridge=not case.get("megatron_bridge", False),
        override_transformer_config=transformer,
        use_dynamic_bsz=True, max_token_len_per_gpu=case.get("tokens", 4096),
        infer_max_token_len_per_gpu=case.get("tokens", 4096),
    )  # fmt: skip
    object.__setattr__(engine_config, "dtype", case.get("dtype", "bfloat16"))  # verl's class refuses float32
    optimizer_config = McoreOptimizerConfig(
        lr=case.get("lr", 1e-3), total_training_steps=10, lr_decay_style=case.get("decay", "linear"),
        use_checkpoint_opt_param_scheduler=True,
    )  # fmt: skip
    model_config = HFModelConfig(
        path=case["model"], override_config={"attn_implementation": "eager"}, lora=case.get("lora", {}),
        model_type=case.get("model_type", "language_model"),
    )  # fmt: skip
    return model_config, engine_config, optimizer_config


def build_engine(case: dict[str, Any]) -> Any:
    model_config, engine_config, optimizer_config = configs_of(case)
    return EngineRegistry.new(
        model_type=case.get("model_type", "language_model"), backend="megatron",
        model_config=model_config, engine_config=engine_config, optimizer_config=optimizer_config,
        checkpoint_config=CheckpointConfig(save_contents=["model", "optimizer", "extra", "hf_model"]),
    )  # fmt: skip


def batch_of(sequences: list[list[int]]) -> Any:
    nested = lambda rows: torch.nested.as_nested_tensor(rows, layout=torch.jagged)  # noqa: E731
    ids = [torch.tensor(s) for s in sequences]
    data = tu.get_tensordict(
        {
            "input_ids": nested(ids),
            "position_ids": nested([torch.arange(len(s)) for s in ids]),
            "loss_mask": nested([torch.ones(len(s), dtype=torch.long) for s in ids]),
        },
        {
            "use_remove_padding": True, "use_dynamic_bsz": True, "max_token_len_per_gpu": 4096,
            "use_fused_kernels": False, "temperature": 1.0, "pad_mode": "no_padding",
        },
    )  # fmt: skip
    return data


def local_share(sequences: list[list[int]]) -> list[list[int]]:
    from megatron.core import parallel_state as mpu

    return sequences[mpu.get_data_parallel_rank() :: mpu.get_data_parallel_world_size()]


def main() -> None:
    case, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    world = case.get("world", 1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), DIST_INIT_METHOD=f"file://{case['out']}/store")
    torch.set_num_threads(1)
    register_engines()
    initialize_global_process_group_ray()
    engine = build_engine(case)
    engine.initialize()
    result: dict[str, Any] = {"losses": [], "logprobs": [], "rates": []}

    def logprobs() -> None:
        with engine.eval_mode(), torch.no_grad():
            out = engine.infer_batch(batch_of(local_share(case["sequences"])), loss_function=None)
        if engine.is_mp_src_rank_with_outputs():
            result["logprobs"].append([row.float() for row in out["model_output"]["log_probs"].unbind()])

    if "load" in case:
        engine.load_checkpoint(case["load"], del_local_after_load=False)
    logprobs()
    for update in range(case.get("updates", 0)):
        if update == case.get("save_before_update"):
            engine.save_checkpoint(f"{case['out']}/checkpoint", global_step=update)
        with engine.train_mode():
            out = engine.train_batch(
                batch_of(local_share(case["sequences"])), loss_function=partial(sft_loss, config=None)
            )
            result["rates"].append(engine.lr_scheduler_step())
        if engine.is_mp_src_rank_with_outputs():
            result["losses"].append(sum(out["loss"]))
        logprobs()
    result["fast_products"] = multiply_bf16_in_fp32.cache_info().currsize
    if "lora" in case:
        adapter, result["peft"] = engine.get_per_tensor_param(base_sync_done=True)
        result["adapter"] = {name: tensor.clone() for name, tensor in adapter}
    weights, _ = engine.get_per_tensor_param()
    result["weights"] = {name: tensor.clone() for name, tensor in weights}
    torch.save(result, f"{case['out']}/rank{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
