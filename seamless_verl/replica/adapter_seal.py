"""Compares the adapter that an engine generates with, with what was staged of it.

vLLM maps the names of an adapter's tensors, multiplies B by the adapter's scale and copies each rank's slices into one
slot of buffers, whose rest is zero. It leaves out a tensor whose module it does not find, and of a module without
tensors it makes zeros, both in silence: such an adapter is refused before it is loaded. After the load each slice is
compared with its buffer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from verl.workers.rollout.vllm_rollout.utils import VLLM_LORA_INT_ID
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.layers.column_parallel_linear import MergedColumnParallelLinearWithLoRA
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import is_base_embedding_weights, parse_fine_tuned_lora_name

from seamless_verl.weights.seal import EVERY

Weights = Sequence[tuple[str, torch.Tensor]]
COPIED_BY = (BaseLinearLayerWithLoRA.set_lora, MergedColumnParallelLinearWithLoRA.set_lora)  # others are not sealed
ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class AdapterSlice:
    """A part of a buffer and what belongs there: `source`, once it has the buffer's dtype, times `scale`."""

    name: str
    target: torch.Tensor
    source: torch.Tensor
    scale: float = 1.0

    def wanted(self, source: torch.Tensor) -> torch.Tensor:
        """Of rows of `source`; rounded as vLLM does it."""
        source = source.to(self.target.dtype)
        return source if self.scale == 1 else source * self.scale


class ResidentAdapter:
    """One staged adapter in one worker's engine."""

    def __init__(self, model: Any, weights: Weights, peft: Any) -> None:
        self.manager = model.lora_manager
        self.scale: float = PEFTHelper.from_dict(peft).vllm_lora_scaling_factor
        self.is_of_all_layers = is_of_all_layers(peft)
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        mapper = getattr(mapper, "get_unstacked_mapper", lambda: mapper)()  # as verl maps them
        self.tensors = dict[tuple[str, bool], tuple[str, torch.Tensor]]()  # by module, and whether it is A
        for name, weight in weights:
            if is_base_embedding_weights(name):  # vLLM leaves them out, too
                continue
            self.tensors[parse_fine_tuned_lora_name(name, mapper)] = name, weight

    def parts(self, module: str) -> list[str]:
        """The names under which the trainer knows what the engine's module has; one unless it is packed."""
        return list(self.manager.packed_modules.get(module, [module]))

    def unsealed(self) -> list[str]:
        """The modules whose buffers vLLM fills otherwise, as those of a mixture's experts."""
        return [name for name, module in self.manager.modules.items() if not self._is_sealed(name, module)]

    def _is_sealed(self, name: str, module: Any) -> bool:
        if type(module).set_lora not in COPIED_BY:
            return False
        return bool(module.n_slices == len(self.parts(name)))

    def unsent(self) -> list[str]:
        """What one of A and B has, and the modules which have none while the same ones of other layers have one."""
        sent = {module for module, _ in self.tensors}
        halves = [module for module in sent if not all((module, is_a) in self.tensors for is_a in (True, False))]
        of_any_layer = {in_any_layer(module) for module in sent} if self.is_of_all_layers else set()
        known = [part for module in self.manager.modules for part in self.parts(module)]
        return halves + [part for part in known if part not in sent and in_any_layer(part) in of_any_layer]

    def untaken(self) -> list[str]:
        """The tensors for which the engine has no module, of any layer: with pipeline stages it has some layers."""
        known = {in_any_layer(part) for module in self.manager.modules for part in self.parts(module)}
        packed = tuple(in_any_layer(module) + "." for module in self.unsealed())
        return [
            name
            for (module, _), (name, _) in self.tensors.items()
            if in_any_layer(module) not in known and not in_any_layer(module).startswith(packed)
        ]

    def slices(self, load: int | None = None) -> Iterator[AdapterSlice]:
        """What its buffers should have, with the zeros beside it; after the load of this number those of some modules,
        of all within EVERY loads. Raises LookupError where it is in no slot."""
        ids = self.manager.lora_index_to_id
        if VLLM_LORA_INT_ID not in ids:
            raise LookupError("the engine has no adapter")
        slot = ids.index(VLLM_LORA_INT_ID)
        for i, (name, module) in enumerate(self.manager.modules.items()):
            if self._is_sealed(name, module) and (load is None or (i + load) % EVERY == 0):
                for is_a, buffers in ((True, module.lora_a_stacked), (False, module.lora_b_stacked)):
                    yield from self._slices_of(name, module, is_a, [buffer[slot, 0] for buffer in buffers])

    def _slices_of(self, name: str, module: Any, is_a: bool, buffers: list[torch.Tensor]) -> Iterator[AdapterSlice]:
        found = [self.tensors.get((part, is_a), (f"none, for {part}", None)) for part in self.parts(name)]
        weights = [weight for _, weight in found]
        if module.tp_size > 1 and any(weight is not None for weight in weights):
            cut = module.slice_lora_a if is_a else module.slice_lora_b
            weights = cut(weights) if name in self.manager.packed_modules else [cut(weights[0])]
        scale = 1.0 if is_a else self.scale
        for buffer, (sent, _), weight in zip(buffers, found, weights, strict=True):
            rows, columns = (0, 0) if weight is None else weight.shape
            text = f"{name}.lora_{'A' if is_a else 'B'} (from weight {sent})"
            if weight is not None:
                yield AdapterSlice(text, buffer[:rows, :columns], weight, scale)
            for rest in (buffer[rows:], buffer[:rows, columns:]):
                if rest.numel():
                    yield AdapterSlice(text, rest, torch.zeros((), dtype=rest.dtype).expand(rest.shape))


def in_any_layer(name: str) -> str:
    """The name without the numbers of layers."""
    return re.sub(r"\.\d+(?=\.)", ".*", name)


def is_of_all_layers(peft: Any) -> bool:
    """Whether nothing in PEFT's config chooses some of the model's layers."""
    targets = peft.get("target_modules")
    return peft.get("layers_to_transform") is None and (not isinstance(targets, str) or targets == ALL_LINEAR)
