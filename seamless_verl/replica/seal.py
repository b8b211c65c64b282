"""Compares what an engine holds with what was staged: the load plan backwards.

After a load each step of the plan is repeated as a comparison, to the bit, of its target with its view of the staged
weight: of some steps a share, drawn anew for each version, of all of them after the memory was away, and the whole of
all at an engine's first load. Some kernels pack a weight in the memory where it is loaded: those steps are compared
before that, and named once.

A parameter that no step writes, or not all of it, was not sent: it has the random values with which an engine begins,
or those of the model's files.
"""

from __future__ import annotations

import ctypes
import logging
import random
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from seamless_verl.errors import SealError
from seamless_verl.replica.load_plan import Copy, Fill, LoadPlan
from seamless_verl.weights.seal import BLOCK, EVERY, blocks_of, digests_of
from seamless_verl.weights.staging import MappedMemory, StagedWeights

if TYPE_CHECKING:
    from seamless_verl.replica.adapter_seal import ResidentAdapter

logger = logging.getLogger(__name__)
Weights = Sequence[tuple[str, torch.Tensor]]
CHUNK = 64 << 20  # bytes that are compared at once
NAMED = 3  # tensors in a message
MEMORY_DIFFERS = ctypes.CDLL(None).memcmp
MEMORY_DIFFERS.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


@dataclass(frozen=True)
class FinalStep:
    """A step of a load whose target no later one changes, in the parameter or buffer of this name."""

    name: str
    step: Copy | Fill

    def __str__(self) -> str:
        weight = f"weight {self.step.name}" if isinstance(self.step, Copy) else f"its padding {self.step.value:g}"
        return f"{self.name} (from {weight})"


class ResidentSeal:
    """Compares one worker's parameters after each load. Owned state: the plan's final steps, the version that fitted
    last, whether the memory was away since, how many loads fitted, and digests of weights that stay while other memory
    is away."""

    def __init__(self, shard: int) -> None:
        self.shard = shard
        self.plan: LoadPlan | None = None
        self.steps: list[FinalStep] = []
        self.unsent: list[str] = []
        self.packed: set[int] | None = None  # places in `steps`; None until a load has shown it
        self.names_packed: set[str] | None = None  # of any plan
        self.fitted: int | None = None
        self.loads = 0  # not versions, of which a replica may leave some out
        self.away = False
        self.remembered: list[tuple[str, torch.Tensor, int]] = []
        self._digests: list[int] = []
        self._unplanned = False  # and it was said

    def mapped(self, staged: StagedWeights, weights: Weights, memory: MappedMemory, shards: int) -> None:
        """Compares the mapped memory with the digests of the trainer; each of an engine's shards looks at its share."""
        if (seal := staged.seal) is None:
            return
        if seal.version != staged.version:
            raise self.error(staged.version, ["the version"], f"its seal is of version {seal.version}")
        if (found := seal.difference(weights, self.shard % shards, shards)) is not None:
            memory.check(staged)  # then it is another version's
            raise self.error(staged.version, ["the staged memory"], found)

    def copied(
        self, plan: LoadPlan | None, models: Sequence[torch.nn.Module], staged: StagedWeights, weights: Weights
    ) -> None:
        """Compares what the engine is going to pack, after the copies; raises SealError for what differs, or lacks."""
        if plan is None or staged.seal is None:
            return
        if plan is not self.plan:
            self.plan, self.packed = plan, None
            self.steps, self.unsent = final_steps(plan, models)
        if self.unsent:
            reason = "the trainer sent no weight for all of it, and `seamless.seal=off` loads nevertheless"
            raise self.error(staged.version, self.unsent, reason)
        some = range(len(self.steps)) if self.packed is None else sorted(self.packed)
        self._compare(some, staged, weights)

    def loaded(self, plan: LoadPlan | None, staged: StagedWeights, weights: Weights) -> None:
        """Compares the others when the engine has loaded; raises SealError for what differs."""
        if staged.seal is None:
            return
        if plan is None:
            if not self._unplanned:
                logger.warning("shard %d: loaded by loaders that compute, whose results are not sealed", self.shard)
            self._unplanned = True
        elif self.packed is None:
            self._find_packed(staged, weights)
        else:
            self._compare([i for i in range(len(self.steps)) if i not in self.packed], staged, weights)
        self._fits(staged)

    def _find_packed(self, staged: StagedWeights, weights: Weights) -> None:
        """By what differs after a plan's first load; what did not after that of an earlier plan is wrong."""
        found = differing(parts(self.steps, range(len(self.steps)), dict(weights), None))
        names = {self.steps[i].name for i in found}
        if self.names_packed is None and names:
            logger.warning(
                "shard %d: sealed only until the engine packs them: %s", self.shard, shortened(sorted(names))
            )
        elif names - (known := self.names_packed or set()):
            wrong = [str(self.steps[i]) for i in found if self.steps[i].name not in known]
            raise self.error(staged.version, wrong, "not what was staged")
        self.packed, self.names_packed = set(found), names

    def check_adapter(self, adapter: ResidentAdapter, version: int, stages: int) -> None:
        """Before an adapter is loaded into one of so many pipeline stages: raises SealError where a part is missing."""
        if unsent := adapter.unsent():
            reason = "the trainer sent no adapter, or half of one, and `seamless.seal=off` loads nevertheless"
            raise self.error(version, unsent, reason)
        if stages == 1 and (untaken := adapter.untaken()):
            reason = "no module of the engine takes it, and `seamless.seal=off` loads nevertheless"
            raise self.error(version, untaken, reason)

    def adapter_loaded(self, adapter: ResidentAdapter, staged: StagedWeights) -> None:
        """Compares drawn rows of some of its slices, or all of the first one; raises SealError for what differs."""
        assert staged.seal is not None
        is_whole = staged.seal.full or self.fitted is None or self.away
        draw = None if is_whole else random.Random(staged.version)
        try:
            slices = list(adapter.slices(None if is_whole else self.loads))
        except LookupError as error:
            raise self.error(staged.version, ["the adapter"], str(error)) from error
        pairs = (
            (i, narrowed(one.target, *part), one.wanted(narrowed(one.source, *part)))
            for i, one in enumerate(slices)
            for part in rows(one.target, draw)
        )
        if found := differing(pairs):
            raise self.error(staged.version, [slices[i].name for i in found], "not what was staged")
        if self.fitted is None and (unsealed := adapter.unsealed()):
            logger.warning("shard %d: of these modules adapters are not sealed: %s", self.shard, shortened(unsealed))
        self._fits(staged)

    def _fits(self, staged: StagedWeights) -> None:
        self.fitted, self.away, self.remembered, self._digests = staged.version, False, [], []
        self.loads += 1

    def remember(self, models: Sequence[torch.nn.Module]) -> None:
        """Makes digests of a drawn block of each parameter and buffer; only once a sealed version was loaded."""
        if self.fitted is None:
            return
        named = [
            (name, one)
            for model in models
            for name, one in (*model.named_parameters(), *model.named_buffers(), *adapter_buffers(model))
        ]
        self.remembered = [(name, one, random.randrange(blocks_of(one))) for name, one in named if one.numel()]
        self._digests = self._remembered_digests()

    def compare_remembered(self, version: int | None = None) -> None:
        """Compares with what was remembered; raises SealError for what changed, also when it is asked again."""
        changed = [
            one[0]
            for one, was, now in zip(self.remembered, self._digests, self._remembered_digests(), strict=True)
            if was != now
        ]
        if changed:
            raise self.error(self.fitted if version is None else version, changed, "changed while memory was away")
        self.remembered, self._digests = [], []

    def _remembered_digests(self) -> list[int]:
        """Waits for a device once."""
        found = [digests_of(tensor.detach(), [block]) for _, tensor, block in self.remembered]
        return torch.cat(found).tolist() if found else []

    def _compare(self, places: Sequence[int], staged: StagedWeights, weights: Weights) -> None:
        assert staged.seal is not None
        draw = None if staged.seal.full or self.packed is None else random.Random(staged.version)
        if draw is not None and not self.away:
            places = [i for i in places if (i + self.loads) % EVERY == 0]
        if places:
            self._compare_at(places, staged, weights, draw)

    def compare_all(self, staged: StagedWeights, weights: Weights) -> bool:
        """Compares all that was loaded and can be read; raises SealError for what differs. False if that is nothing."""
        places = [i for i in range(len(self.steps)) if i not in (self.packed or ())]
        self._compare_at(places, staged, weights, None)
        return bool(places)

    def _compare_at(
        self, places: Sequence[int], staged: StagedWeights, weights: Weights, draw: random.Random | None
    ) -> None:
        if found := differing(parts(self.steps, places, dict(weights), draw)):
            raise self.error(staged.version, [str(self.steps[i]) for i in found], "not what was staged")

    def error(self, version: int, names: Sequence[str], reason: str) -> SealError:
        since = "none so far" if self.fitted is None else f"version {self.fitted}"
        return SealError(version, self.shard, shortened(names), reason, since)


def shortened(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def adapter_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers of an engine's adapters, which are none of the model's; none where it takes no adapters."""
    for name, module in getattr(getattr(model, "lora_manager", None), "modules", {}).items():
        for buffers in ("lora_a_stacked", "lora_b_stacked"):
            yield from ((f"{name}.{buffers}.{i}", buffer) for i, buffer in enumerate(getattr(module, buffers)))


def final_steps(plan: LoadPlan, models: Sequence[torch.nn.Module]) -> tuple[list[FinalStep], list[str]]:
    """The steps of a load that stay to its end, and the parameters that they leave out, or a part of."""
    memory = dict[int, tuple[str, torch.Tensor]]()
    for model in models:
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.numel():
                memory.setdefault(tensor.data_ptr(), (name, tensor))
    begins = sorted(memory)
    steps_at = dict[int, list[Copy | Fill]]()
    for step in plan.steps:
        begin = begins[bisect_right(begins, step.target.data_ptr()) - 1]
        steps_at.setdefault(begin, []).append(step)
    final, unsent = list[FinalStep](), list[str]()
    for begin, (name, tensor) in memory.items():
        stay, whole = staying(tensor, steps_at.get(begin, []))
        final += [FinalStep(name, step) for step in stay]
        if not whole and isinstance(tensor, torch.nn.Parameter):
            unsent.append(name)
    return final, unsent


def staying(tensor: torch.Tensor, steps: Sequence[Copy | Fill]) -> tuple[list[Copy | Fill], bool]:
    """Those of the steps into a tensor that no later one writes over, and whether all together write all of it."""
    if not steps:
        return [], False
    if len(steps) == 1:
        return list(steps), steps[0].target.numel() == tensor.numel()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    writer = torch.zeros(extent, dtype=torch.int16)  # of each element, from 1; a mixture's parameter has hundreds
    places = [
        writer.as_strided(
            step.target.size(), step.target.stride(), step.target.storage_offset() - tensor.storage_offset()
        )
        for step in steps
    ]
    for i, place in enumerate(places, 1):
        place.fill_(i)
    stay = [step for i, (step, place) in enumerate(zip(steps, places, strict=True), 1) if bool((place == i).all())]
    return stay, int(writer.count_nonzero()) == tensor.numel()


def parts(
    steps: Sequence[FinalStep], places: Iterable[int], weights: dict[str, torch.Tensor], draw: random.Random | None
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Of steps at these places a drawn block of target and source, or all of them."""
    for i in places:
        step = steps[i].step
        for part in rows(step.target, draw):
            yield i, narrowed(step.target, *part), narrowed(step.source(weights), *part)


def differing(pairs: Iterable[tuple[int, torch.Tensor, torch.Tensor]]) -> list[int]:
    """The places at which what is there differs from what is wanted."""
    looked, found = list[int](), list[torch.Tensor | bool]()
    for i, there, wanted in pairs:
        looked.append(i)
        found.append(unequal(there, wanted))
    on_device = [one for one in found if isinstance(one, torch.Tensor)]
    unequals = torch.stack(on_device).tolist() if on_device else found  # waits for a device once
    return sorted({i for i, is_unequal in zip(looked, unequals, strict=True) if is_unequal})


def rows(tensor: torch.Tensor, draw: random.Random | None) -> Iterator[tuple[int, int]]:
    """Begin and number of rows that are compared at once: about a block that is drawn, or all, chunk by chunk."""
    number = tensor.shape[0] if tensor.ndim else 1
    nbytes = max(1, tensor.nbytes // number)
    if draw is not None:
        count = min(number, max(1, BLOCK // nbytes))
        yield draw.randint(0, number - count), count
        return
    count = max(1, CHUNK // nbytes)
    for begin in range(0, number, count):
        yield begin, min(count, number - begin)


def narrowed(tensor: torch.Tensor, begin: int, count: int) -> torch.Tensor:
    return tensor.narrow(0, begin, count) if tensor.ndim else tensor


def unequal(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor | bool:
    """Whether they differ in a bit, once `wanted` has the dtype of `found`; of a device a bool there."""
    found, wanted = found.contiguous(), wanted.to(found.device, found.dtype).contiguous()
    if found.device.type == "cpu":
        return bool(MEMORY_DIFFERS(found.data_ptr(), wanted.data_ptr(), found.nbytes))
    pair = [one.reshape(-1).view(torch.uint8) for one in (found, wanted)]
    if all(one.numel() % 8 == 0 and one.storage_offset() % 8 == 0 for one in pair):  # several times as fast
        pair = [one.view(torch.int64) for one in pair]
    return (pair[0] != pair[1]).any()
