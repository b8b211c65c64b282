"""Stages in a thread of a trainer's worker, which goes on meanwhile; holds back what would change the weights.

Between two optimizer steps nothing changes the weights, so that the worker's next forward and backward passes may run
while a thread copies. The worker's own thread starts the copy, and calls `wait` before it changes or moves the weights.

verl's engine gives the weights one by one, gathered from the other ranks. Two threads that use the same process groups,
in another order on another rank, wait for each other for ever. So a thread exports only where every collective of the
export is in a group of this rank alone, for which no other rank is ever waited for:

- Both bridges gather over the pipeline, tensor, expert and expert tensor groups, and over no other (mbridge/core,
  `export_weights`; megatron/bridge/models/conversion/{param_mapping,model_bridge,peft_bridge}.py). Of weights that verl
  quantizes (`qat`) this was not verified.
- Megatron's FSDP, and verl's FSDP engines, keep a part of each weight on each rank.

The weights must also stay as they are, and where they are, until the next optimizer step. So it does not where ranks
gather parts during the next forward pass (`overlap_param_gather`), where the balance of experts changes at the end of a
backward pass (Megatron's `finalize_model_grads`), or where weights are put away between computations. And while a CUDA
graph is captured, no other thread of the process may use the device.

Invariants:
- At most one copy is open: the next one is started only after it has ended, which `weights/commit.py` waits for.
- Every copy ends, with a report or with the error that `result` raises; `wait` does not raise it.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from seamless_verl.weights.staging import Report


MODEL_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
BARS = ("export_hf_weights", "export_adapter_weights")
HELD = ("optimizer_step", "load_checkpoint", "save_checkpoint")  # the last exports weights, over the same groups


class StagingBegun(NamedTuple):
    """A rank's reply that it copies its share in the background, to the memory of this Ray node."""

    host: str


class StagingEnd(NamedTuple):
    """A rank's report of the copy, and the seconds for which it held back a change of the weights."""

    report: Report
    held_s: float = 0.0


class BackgroundStaging:
    """Owns the thread that copies, and the copy that was started last."""

    def __init__(self) -> None:
        self._end: Future[StagingEnd] | None = None
        self._held_since: float | None = None

    def start(self, copy: Callable[[], Report]) -> None:
        """Copies in a thread."""
        assert self._end is None or self._end.done(), "a version is staged while another one still is"
        self._end, self._held_since = Future(), None
        threading.Thread(target=self._run, args=(copy, self._end), name="staging", daemon=True).start()

    def wait(self) -> None:
        """Returns when no copy is open. Called before the weights change or move, in the thread that starts copies."""
        if self._end is not None and not self._end.done():
            self._held_since = self._held_since or time.monotonic()
            futures.wait([self._end])

    def result(self) -> StagingEnd:
        """The end of the last copy, when it has ended; raises its error. Without any copy, an end without a report."""
        return StagingEnd(None) if self._end is None else self._end.result()

    def _run(self, copy: Callable[[], Report], end: Future[StagingEnd]) -> None:
        try:
            report = copy()
        except BaseException as error:  # raised to who asks for the result
            end.set_exception(error)
            return
        held_since = self._held_since
        end.set_result(StagingEnd(report, 0.0 if held_since is None else time.monotonic() - held_since))


def exports_alone(engine: Any) -> bool:
    """Whether the export of this engine of verl needs no other rank, and its weights stay until an optimizer step."""
    config = engine.engine_config
    if config.strategy != "megatron" or config.use_megatron_fsdp or engine._qat_enabled:
        return False
    whole = all(getattr(config, size) in (1, None) for size in MODEL_SIZES)
    put_away = engine.is_param_offload_enabled
    gathered_late = any(getattr(chunk.ddp_config, "overlap_param_gather", False) for chunk in engine.module)
    model = engine.tf_config
    captured = getattr(model, "enable_cuda_graph", False) or getattr(model, "cuda_graph_impl", "none") != "none"
    experts = model.num_moe_experts
    return whole and not (put_away or gathered_late or experts or captured)


def without_progress_bars(engine: Any) -> None:
    """Makes Megatron-Bridge export without a bar of progress, which would go to the run's output at every commit."""
    if engine.engine_config.strategy == "megatron" and not engine.vanilla_bridge:
        for name in BARS:
            setattr(engine.bridge, name, functools.partial(getattr(engine.bridge, name), show_progress=False))


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
