"""Whether a trainer's worker may export its weights in a thread, and what it must then hold back.

verl's engine gives the weights one by one, gathered from the other ranks. Two threads that use the same process groups,
in another order on another rank, wait for each other for ever. So a thread exports only where every collective of the
export is in a group of this rank alone, for which no other rank is ever waited for:

- mbridge gathers over the pipeline, tensor, expert and expert tensor groups, and over no other (mbridge/core/bridge.py,
  `export_weights`). Of Megatron-Bridge, verl's other flavour, this was not verified.
- Megatron's FSDP, and verl's FSDP engines, keep a part of each weight on each rank.

The weights must also stay as they are, and where they are, until the next optimizer step:

- with `overlap_param_gather` ranks gather the parts that others have stepped during the next forward pass;
- the balance of experts changes at the end of a backward pass (Megatron's `finalize_model_grads`);
- weights that are put away between computations are moved by each of them.

And while a CUDA graph is captured, no other thread of the process may use the device.

Sizes of data and context parallelism do not matter: each of their ranks has the whole model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

MODEL_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
HELD = ("optimizer_step", "load_checkpoint", "save_checkpoint")  # the last exports weights, over the same groups


def exports_alone(engine: Any) -> bool:
    """Whether the export of this engine of verl needs no other rank, and its weights stay until an optimizer step."""
    config = engine.engine_config
    if config.strategy != "megatron" or not engine.vanilla_bridge or config.use_megatron_fsdp:
        return False
    whole = all(getattr(config, size) in (1, None) for size in MODEL_SIZES)
    put_away = engine.is_param_offload_enabled
    gathered_late = any(getattr(chunk.ddp_config, "overlap_param_gather", False) for chunk in engine.module)
    model = engine.tf_config
    captured = getattr(model, "enable_cuda_graph", False) or getattr(model, "cuda_graph_impl", "none") != "none"
    experts = model.num_moe_experts
    return whole and not (put_away or gathered_late or experts or captured)


def hold_changes(engine: Any, wait: Callable[[], None]) -> None:
    """Makes this engine call `wait` before it changes, moves or saves its weights, whoever asks for that."""
    for name in HELD:
        setattr(engine, name, _after(wait, getattr(engine, name)))
    move = engine.to

    @functools.wraps(move)
    def to(device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        if model:  # each computation calls it, also where it moves nothing
            wait()
        move(device=device, model=model, optimizer=optimizer, grad=grad)

    engine.to = to


def _after(wait: Callable[[], None], method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def waiting(*args: Any, **kwargs: Any) -> Any:
        wait()
        return method(*args, **kwargs)

    return waiting
