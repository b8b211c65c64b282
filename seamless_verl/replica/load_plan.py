"""Records which copies a weight load makes, and repeats them without the model's loaders.

A model's loaders find for each weight its place among the engine's parameters (names mapped, Q, K and V side by side,
a rank's shard narrowed). That is Python, a third of a small model's load, and the engine is paused for it; the result
is the same copies each time. A load has a plan only if all it does with the weights, as torch's dispatcher sees it, is
to copy views of them into parameters and buffers: none if it computes with one, reads a value, or keeps one elsewhere,
and none if the engine's parameters lie elsewhere after it.
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
    """A view of the weight `name`, `offset` elements into it, goes to `target`, a view of a parameter."""

    target: torch.Tensor
    name: str
    offset: int
    size: Sequence[int]
    stride: Sequence[int]

    def run(self, weights: Mapping[str, torch.Tensor]) -> None:
        weight = weights[self.name]
        self.target.copy_(weight.as_strided(self.size, self.stride, weight.storage_offset() + self.offset))


@dataclass(frozen=True)
class Fill:
    """A padding of a parameter with one value."""

    target: torch.Tensor
    value: float

    def run(self, weights: Mapping[str, torch.Tensor]) -> None:
        self.target.fill_(self.value)


@dataclass(frozen=True)
class LoadPlan:
    """What a load of weights of these `signatures` does to these `addresses`, in order."""

    signatures: list[Any]
    addresses: set[int]
    steps: list[Copy | Fill]

    def fits(self, weights: Weights, models: Iterable[torch.nn.Module]) -> bool:
        return self.signatures == signatures_of(weights) and self.addresses == addresses_of(models)

    @torch.no_grad()
    def load(self, weights: Weights) -> None:
        named = dict(weights)
        for step in self.steps:
            step.run(named)


@dataclass
class Plans:
    """Owns the plan of a worker's loads: its first load is to give it, and it is given up when it does not fit."""

    plan: LoadPlan | None = None
    tried: bool = False

    def load(self, weights: Weights, models: Sequence[torch.nn.Module]) -> bool:
        """Load by the plan; False where there is none for these, and nothing was loaded."""
        if self.plan is not None and not self.plan.fits(weights, models):
            logger.warning("weights or parameters are not what they were: the model's own loaders load from now on")
            self.plan = None
        if self.plan is not None:
            self.plan.load(weights)
        return self.plan is not None

    @contextmanager
    def recording(self, models: Sequence[torch.nn.Module]) -> Iterator[Callable[[Weights], None]]:
        """Loaders run inside the block; what it gives hears of each bucket before they do."""
        if self.tried:
            yield lambda bucket: None
            return
        self.tried = True
        with CopyRecorder(models) as recording:
            yield recording.next_bucket
        self.plan = recording.plan()


class CopyRecorder(TorchDispatchMode):
    """Active while loaders run: notes their copies from `sources`, and whether they do anything else that lasts."""

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        self.models = models
        self.addresses = addresses_of(models)
        self.signatures = list[Any]()
        self.sources = list[tuple[str, torch.Tensor]]()
        self.steps = list[Copy | Fill]()
        self.complete = True  # all that was done is in `steps`

    def next_bucket(self, bucket: Weights) -> None:
        """These are the weights that are loaded next; the earlier ones may be gone from memory."""
        self.sources = list(bucket)
        self.signatures += signatures_of(bucket)

    def plan(self) -> LoadPlan | None:
        """After the load: how to do it again."""
        self.sources = []
        still = self.complete and self.addresses == addresses_of(self.models)
        return LoadPlan(self.signatures, self.addresses, self.steps) if still else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(self.is_parameter, written_tensors(func, args, kwargs or {}))):
            step = self.step(func, *args)
            self.steps += [] if step is None else [step]
            self.complete = self.complete and step is not None
        elif func is READ_VALUE or (not is_view(func) and any(map(self.is_source, tree_leaves((args, kwargs))))):
            self.complete = False
        return func(*args, **(kwargs or {}))

    def is_parameter(self, changed: torch.Tensor) -> bool:
        return changed.numel() > 0 and changed.untyped_storage().data_ptr() in self.addresses

    def is_source(self, one: Any) -> bool:
        memory = {weight.untyped_storage().data_ptr() for _, weight in self.sources}
        return isinstance(one, torch.Tensor) and one.untyped_storage().data_ptr() in memory

    def step(self, func: Any, target: Any = None, what: Any = None, *more: Any) -> Copy | Fill | None:
        if func is FILL:
            return Fill(target.detach(), what)
        for name, weight in self.sources if func is COPY else ():
            offset = what.data_ptr() - weight.data_ptr()
            if weight.dtype == what.dtype and 0 <= offset < weight.nbytes:
                return Copy(target.detach(), name, offset // weight.itemsize, what.size(), what.stride())
        return None


def is_view(func: Any) -> bool:
    """Whether what it returns is memory that it was given, and it writes nothing."""
    return any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)


def written_tensors(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors among its arguments that an operator changes, by its own schema."""
    for place, one in enumerate(func._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(one.name)
        if one.alias_info is not None and one.alias_info.is_write and value is not None:
            yield from [value] if isinstance(value, torch.Tensor) else value


def signatures_of(weights: Weights) -> list[Any]:
    return [(name, weight.dtype, weight.shape) for name, weight in weights]


def addresses_of(models: Iterable[torch.nn.Module]) -> set[int]:
    """Where the memory of parameters and buffers begins."""
    tensors = (tensor for model in models for group in (model.parameters(), model.buffers()) for tensor in group)
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}
