"""One rank of a Megatron engine whose weights are copied in a thread while it computes and makes an optimizer step.

Run as `python -c "from support.staging_process import main; main()" CASE.json RANK`. The copy stops after its first
weight, until the rank has come to its optimizer step, and then for long enough that an unguarded step is made. Every
rank writes what it found to `<out>/rank<r>.json`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import torch
from verl.utils.distributed import initialize_global_process_group_ray
from verl.workers.utils.losses import sft_loss

from seamless_verl.platform.engine import register_engines
from seamless_verl.weights.background import BackgroundStaging, exports_alone, hold_changes
from seamless_verl.weights.staging import StagingMemory
from support.megatron_process import batch_of, build_engine, local_share

STEP_S = 2.0  # within which an unguarded step ends
LIMIT_S = 60.0


class SlowMemory(StagingMemory):
    """Staged memory that waits for the optimizer step before its second weight."""

    def __init__(self) -> None:
        super().__init__("here")
        self.reached, self.stepped = threading.Event(), threading.Event()

    def add(self, name: str, weight: torch.Tensor) -> None:
        if len(self.placed) == 1:
            assert self.reached.wait(LIMIT_S)
            self.stepped.wait(STEP_S)
        super().add(name, weight)


def watch_steps(engine: Any, memory: SlowMemory) -> None:
    step = engine.optimizer_step

    def watched() -> Any:
        memory.reached.set()
        result = step()
        memory.stepped.set()
        return result

    engine.optimizer_step = watched


def exported(engine: Any) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in engine.get_per_tensor_param()[0]}


def staged_beside_an_update(engine: Any, staging: BackgroundStaging, sequences: list[list[int]]) -> dict[str, Any]:
    memory, before = SlowMemory(), exported(engine)
    watch_steps(engine, memory)
    memory.begin()
    weights, _ = engine.get_per_tensor_param()

    def copy() -> Any:
        for name, weight in weights:
            memory.add(name, weight)
        return memory.end(1)

    staging.start(copy)
    with engine.train_mode():
        engine.train_batch(batch_of(local_share(sequences)), loss_function=partial(sft_loss, config=None))
    end = staging.result()
    assert end.report is not None
    found, after = dict(end.report.map()), exported(engine)
    same = [name for name, weight in before.items() if torch.equal(found[name], weight)]
    moved = [name for name, weight in before.items() if not torch.equal(after[name], weight)]
    memory.close()
    return {"weights": len(before), "same": len(same), "moved": len(moved), "held_s": end.held_s}


def main() -> None:
    case, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(case["world"]), DIST_INIT_METHOD=f"file://{case['out']}/store")
    torch.set_num_threads(1)
    register_engines()
    initialize_global_process_group_ray()
    engine = build_engine(case)
    engine.initialize()
    staging = BackgroundStaging()
    if case["guarded"]:
        hold_changes(engine, staging.wait)
    result = {"alone": exports_alone(engine)} | staged_beside_an_update(engine, staging, case["sequences"])
    Path(case["out"], f"rank{rank}.json").write_text(json.dumps(result))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
