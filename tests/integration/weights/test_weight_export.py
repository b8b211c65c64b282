"""Weights copied in a thread beside a computation: never of two versions, and only where no other rank is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.paths import child_environment

pytestmark = pytest.mark.integration
COMMAND = ("-W", "ignore", "-c", "from support.staging_process import main; main()")
SEQUENCES = [[7, 1, 9, 4, 4, 2], [3, 30, 11, 5, 8, 6, 1, 12]]


def staged(
    folder: Path, model: Path, *, guarded: bool, world: int, megatron_bridge: bool = False
) -> list[dict[str, Any]]:
    case = folder / "case.json"
    case.write_text(json.dumps(dict(
        model=str(model), out=str(folder), world=world, guarded=guarded, sequences=SEQUENCES,
        megatron_bridge=megatron_bridge,
    )))  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, *COMMAND, str(case), str(rank)], env=child_environment(), stderr=subprocess.STDOUT,
            stdout=subprocess.PIPE, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world, "\n".join(outputs)[-4000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world)]


@pytest.mark.parametrize("megatron_bridge", [False, True], ids=["mbridge", "megatron_bridge"])
def test_an_optimizer_step_waits_for_the_copy_on_every_rank(nano: Path, tmp_path: Path, megatron_bridge: bool) -> None:
    """Of two data parallel ranks, whose steps need each other; forward and backward passes did not wait."""
    for found in staged(tmp_path, nano / "model", guarded=True, world=2, megatron_bridge=megatron_bridge):
        assert found["alone"] and found["same"] == found["weights"] > 2, "the copy has weights of two versions"
        assert found["moved"] > 0 and found["held_s"] > 0


def test_without_the_guard_the_copy_would_be_torn(nano: Path, tmp_path: Path) -> None:
    (found,) = staged(tmp_path, nano / "model", guarded=False, world=1)
    assert 0 < found["same"] < found["weights"] and found["held_s"] == 0, "the test above could not fail"


def engine(**changed: Any) -> Any:
    """verl's Megatron engine of one rank, as far as is asked of it; a name with a dot changes a part of it."""
    sizes = dict.fromkeys(
        ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"), 1
    )
    config = SimpleNamespace(strategy="megatron", use_megatron_fsdp=False, expert_tensor_parallel_size=None, **sizes)
    chunk = SimpleNamespace(ddp_config=SimpleNamespace(overlap_param_gather=False))
    made = SimpleNamespace(
        engine_config=config,
        _qat_enabled=False,
        is_param_offload_enabled=False,
        module=[chunk],
        tf_config=SimpleNamespace(num_moe_experts=None, enable_cuda_graph=False, cuda_graph_impl="none"),
    )
    for name, value in changed.items():
        *parts, last = name.split("__")
        owner: Any = made
        for part in parts:
            owner = getattr(owner, part)
        assert hasattr(owner, last)
        setattr(owner, last, value)
    return made


@pytest.mark.parametrize(
    "changed",
    [
        {"engine_config__strategy": "fsdp2"},
        {"engine_config__use_megatron_fsdp": True},
        {"engine_config__tensor_model_parallel_size": 2},
        {"engine_config__pipeline_model_parallel_size": 2},
        {"engine_config__expert_model_parallel_size": 2},
        {"engine_config__expert_tensor_parallel_size": 2},
        {"_qat_enabled": True},
        {"is_param_offload_enabled": True},
        {"tf_config__num_moe_experts": 8},
        {"tf_config__enable_cuda_graph": True},
        {"tf_config__cuda_graph_impl": "local"},
        {"module": [SimpleNamespace(ddp_config=SimpleNamespace(overlap_param_gather=True))]},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_an_export_that_needs_other_ranks_or_whose_weights_move_is_not_in_a_thread(changed: dict[str, Any]) -> None:
    from seamless_verl.weights.background import exports_alone

    assert exports_alone(engine()) and not exports_alone(engine(**changed))


def test_whatever_changes_moves_or_saves_weights_waits_first_and_nothing_else() -> None:
    from seamless_verl.weights.background import hold_changes

    calls = list[str]()

    class Engine:
        """verl's, as far as it is held."""

        def __getattr__(self, name: str) -> Any:
            return lambda *args, **kwargs: calls.append(name)

    held: Any = Engine()
    held.to = lambda device, model, optimizer, grad: calls.append(f"to {device}, {model}")
    hold_changes(held, lambda: calls.append("wait"))
    held.optimizer_step()
    held.load_checkpoint("folder")
    held.save_checkpoint("folder", global_step=1)
    held.to("cpu")
    assert calls == [
        *("wait", "optimizer_step", "wait", "load_checkpoint", "wait", "save_checkpoint", "wait", "to cpu, True")
    ]
    calls.clear()
    held.to(device="cpu", model=False, optimizer=True, grad=False)
    held.infer_batch("batch")
    assert calls == ["to cpu, False", "infer_batch"]
