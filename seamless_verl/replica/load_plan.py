"""Records which copies a weight load makes, and repeats them without the model's loaders.

Loaders map names, join Q, K and V, and narrow a rank's shard: Python, a third of a small model's load, while the engine
is paused, with the same copies each time. A load has a plan only if all it does with the weights, as torch's dispatcher
sees it, is to copy views of them into parameters and buffers; none if it computes with a weight, reads a value or
stores a weight elsewhere, or if the engine's parameters have moved in memory after it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

logger = logging.getLogger(__name__)
Weights = Sequence[tuple[str, torch.Tensor]]
COPY, FILL = torch.ops.aten.copy_.default, torch.ops.aten.fill_.Scalar
READ_VALUE = torch.ops.aten._local_scalar_dense.default  # item(), bool()


@dataclass(frozen=True)
class Copy:
    """Copies a view of the weight `name`, `offset` elements into it, to `target`, a view of a parameter."""

    target: torch.Tensor
    name: str
    offset: int
    size: Sequence[int]
    stride: Sequence[int]

    def run(self, weights: Mapping[str, torch.Tensor]) -> None:
        """On a device, the copy may still run when this returns."""
        weight, source = weights[self.name], self.source(weights)
        if self.target.device != weight.device and not source.is_contiguous():
            # A shard of a row. The host would gather it word by word; the device does it after one transfer.
            extent = 1 + sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))
            whole = weight.as_strided((extent if source.numel() else 0,), (1,), source.storage_offset())
            source = whole.to(self.target.device, non_blocking=True).as_strided(self.size, self.stride, 0)
        self.target.copy_(source, non_blocking=True)

    def source(self, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The view of the weight, of the shape of the target."""
        weight = weights[self.name]
        return weight.as_strided(self.size, self.stride, weight.storage_offset() + self.offset)


@dataclass(frozen=True)
class Fill:
    """Fills `target`, a padding of a parameter, with one value."""

    target: torch.Tensor
    value: float

    def run(self, weights: Mapping[str, torch.Tensor]) -> None:
        self.target.fill_(self.value)

    def source(self, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The value, in the shape of the target."""
        return torch.full((), self.value, dtype=self.target.dtype).expand(self.target.shape)


@dataclass(frozen=True)
class LoadPlan:
    """The copies, in order, of a load of weights with these `signatures` into memory at these `addresses`."""

    signatures: list[Any]
    addresses: set[int]
    steps: list[Copy | Fill]

    def fits(self, weights: Weights, models: Iterable[torch.nn.Module]) -> bool:
        return self.signatures == signatures_of(weights) and self.addresses == addresses_of(models)

    @torch.no_grad()
    def load(self, weights: Weights) -> None:
        """Starts all copies; on a device they have ended when it was synchronized."""
        named = dict(weights)
        for step in self.steps:
            step.run(named)


@dataclass
class PlanCache:
    """Owns a worker's load plan, recorded during its first load and dropped when it does not fit any more."""

    plan: LoadPlan | None = None
    attempted: bool = False  # a plan has been recorded, or could not be

    def load(self, weights: Weights, models: Sequence[torch.nn.Module]) -> bool:
        """Loads by the plan; False if there is none for these weights and models, then nothing was loaded."""
        if self.plan is not None and not self.plan.fits(weights, models):
            logger.warning("weights or parameters have changed: from now on the model's own loaders load")
            self.plan = None
        if self.plan is not None:
            self.plan.load(weights)
        return self.plan is not None

    @contextmanager
    def recording(self, models: Sequence[torch.nn.Module]) -> Iterator[Callable[[Weights], None]]:
        """Records the loaders that run inside the block; they are given each bucket after the yielded function."""
        if self.attempted:
            yield lambda bucket: None
            return
        self.attempted = True
        with CopyRecorder(models) as recorder:
            yield recorder.next_bucket
        self.plan = recorder.plan()


class CopyRecorder(TorchDispatchMode):
    """Active while loaders run: records their copies from `sources`, and whether they do anything else of effect."""

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        self.models = models
        self.addresses = addresses_of(models)
        self.signatures = list[Any]()
        self.sources = list[tuple[str, torch.Tensor]]()
        self.steps = list[Copy | Fill]()
        self.complete = True  # whether `steps` has all that was done

    def next_bucket(self, bucket: Weights) -> None:
        """These weights are loaded next; earlier ones may have been freed."""
        self.sources = list(bucket)
        self.signatures += signatures_of(bucket)

    def plan(self) -> LoadPlan | None:
        """After the load: the plan that repeats it; None if there is none."""
        self.sources = []
        repeatable = self.complete and self.addresses == addresses_of(self.models)
        return LoadPlan(self.signatures, self.addresses, self.steps) if repeatable else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(self.is_parameter, written_tensors(func, args, kwargs or {}))):
            step = self.step(func, *args)
            self.steps += [] if step is None else [step]
            self.complete = self.complete and step is not None
        elif func is READ_VALUE or (not is_view(func) and any(map(self.is_source, tree_leaves((args, kwargs))))):
            self.complete = False
        return func(*args, **(kwargs or {}))

    def is_parameter(self, tensor: torch.Tensor) -> bool:
        return tensor.numel() > 0 and tensor.untyped_storage().data_ptr() in self.addresses

    def is_source(self, value: Any) -> bool:
        memory = {weight.untyped_storage().data_ptr() for _, weight in self.sources}
        return isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in memory

    def step(self, func: Any, target: Any = None, source: Any = None, *rest: Any) -> Copy | Fill | None:
        if func is FILL:
            return Fill(target.detach(), source)
        for name, weight in self.sources if func is COPY else ():
            offset = source.data_ptr() - weight.data_ptr()
            if weight.dtype == source.dtype and 0 <= offset < weight.nbytes:
                return Copy(target.detach(), name, offset // weight.itemsize, source.size(), source.stride())
        return None


def is_view(func: Any) -> bool:
    """Whether the operator returns views of its arguments, and writes nothing."""
    aliases = [result.alias_info for result in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def written_tensors(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors among its arguments that an operator changes, by its own schema."""
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write and value is not None:
            yield from [value] if isinstance(value, torch.Tensor) else value


def signatures_of(weights: Weights) -> list[Any]:
    return [(name, weight.dtype, weight.shape) for name, weight in weights]


def addresses_of(models: Iterable[torch.nn.Module]) -> set[int]:
    """The addresses at which the memory of parameters and buffers begins."""
    tensors = (tensor for model in models for group in (model.parameters(), model.buffers()) for tensor in group)
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}
