"""What an engine holds, compared with what was staged: each fault has its name, and no load without one is stopped."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from seamless_verl.errors import SealError
from seamless_verl.replica.load_plan import Copy, PlanCache
from seamless_verl.replica.seal import ResidentSeal, final_steps
from seamless_verl.weights.seal import EVERY
from seamless_verl.weights.staging import MappedMemory, StagedWeights, StagingMemory, map_on_this_host

pytestmark = pytest.mark.integration
LAYERS, WIDTH = 3, 64
Weights = list[tuple[str, torch.Tensor]]


def trained(version: int) -> dict[str, torch.Tensor]:
    """A trainer's weights, each of which every version changes."""
    generator = torch.Generator().manual_seed(version)
    shapes = {"embed": (96, WIDTH), "norm": (WIDTH,)}
    for i in range(LAYERS):
        shapes |= {f"{i}.gate": (128, WIDTH), f"{i}.up": (128, WIDTH), f"{i}.down": (WIDTH, 128)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


class Layer(torch.nn.Module):
    """One rank's shard: gate and up in one parameter, down narrowed along its columns."""

    def __init__(self, shards: int) -> None:
        super().__init__()
        self.gate_up = torch.nn.Parameter(torch.zeros(256 // shards, WIDTH, dtype=torch.bfloat16))
        self.down = torch.nn.Parameter(torch.zeros(WIDTH, 128 // shards))


class Sharded(torch.nn.Module):
    """A model with a padded vocabulary and a computed buffer, of which each rank has a shard."""

    def __init__(self, rank: int = 0, shards: int = 1) -> None:
        super().__init__()
        self.rank, self.shards = rank, shards
        self.embed = torch.nn.Parameter(torch.zeros(100, WIDTH))
        self.tied = self.embed
        self.norm = torch.nn.Parameter(torch.zeros(WIDTH))
        self.layers = torch.nn.ModuleList(Layer(shards) for _ in range(LAYERS))
        self.register_buffer("positions", torch.arange(4.0))
        self.requires_grad_(False)

    def load(self, weights: Weights) -> None:
        for name, weight in weights:
            if name == "embed":
                self.embed.data[:96].copy_(weight)
                self.embed.data[96:].fill_(0)
            elif name == "norm":
                self.norm.data.copy_(weight)
            else:
                layer, which = self.layers[int(name[0])], name[2:]
                rows = 128 // self.shards
                if which == "down":
                    layer.down.data.copy_(weight.narrow(1, self.rank * rows, rows))
                else:
                    begin = rows * (which == "up")
                    layer.gate_up.data.narrow(0, begin, rows).copy_(weight.narrow(0, self.rank * rows, rows))


class Worker:
    """What a vLLM worker does with a version, without the engine. `pack` is done after the copies, as by kernels."""

    def __init__(
        self, model: torch.nn.Module, shard: int = 0, pack: Callable[[Any], object] = lambda model: None
    ) -> None:
        self.model, self.cache, self.memory = model, PlanCache(), MappedMemory()
        self.seal, self.pack = ResidentSeal(shard), pack

    def load(self, staged: StagedWeights) -> None:
        staged, weights = map_on_this_host([staged], self.memory)
        self.seal.mapped(staged, weights, self.memory, getattr(self.model, "shards", 1))
        if not self.cache.load(weights, [self.model]):
            with self.cache.recording([self.model]) as next_bucket:
                next_bucket(weights)
                self.model.load(weights)
        self.seal.copied(self.cache.plan, [self.model], staged, weights)
        self.pack(self.model)
        self.seal.loaded(self.cache.plan, staged, weights)


class Trainer:
    def __init__(self) -> None:
        self.memory = StagingMemory("here")
        self.memory.seal = "sample"

    def stage(self, version: int, weights: Mapping[str, torch.Tensor] | None = None) -> StagedWeights:
        self.memory.begin()
        for name, weight in (trained(version) if weights is None else weights).items():
            self.memory.add(name, weight)
        return self.memory.end(version)


def found_within(worker: Worker, trainer: Trainer, versions: int, begin: int = 2) -> SealError:
    """The error of the first of so many versions that has one."""
    for version in range(begin, begin + versions):
        try:
            worker.load(trainer.stage(version))
        except SealError as error:
            return error
    raise AssertionError("nothing was found")


def test_two_thousand_versions_without_a_false_alarm() -> None:
    trainer, worker = Trainer(), Worker(Sharded())
    for version in range(2000):
        if version % 50 == 49:
            worker.seal.away = True
        if version % 20 == 19:
            worker.seal.remember([worker.model])
            worker.seal.compare_remembered()
        worker.load(trainer.stage(version))
    assert worker.cache.plan is not None and worker.seal.fitted == 1999


@pytest.mark.parametrize("left_out", ["norm", "1.up", "2.down", "embed"])
def test_a_tensor_that_is_not_sent_is_named_at_the_first_load(left_out: str) -> None:
    weights = {name: weight for name, weight in trained(1).items() if name != left_out}
    names = {"norm": "norm", "1.up": "layers.1.gate_up", "2.down": "layers.2.down", "embed": "embed"}
    trainer, worker = Trainer(), Worker(Sharded())
    for _ in range(2):  # also when it loads again
        with pytest.raises(SealError, match=f"version 1, shard 0: {names[left_out]}: the trainer sent no weight"):
            worker.load(trainer.stage(1, weights))


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_stale_layer_is_named_within_a_few_versions(layer: int) -> None:
    trainer, worker = Trainer(), Worker(Sharded())
    worker.load(trainer.stage(1))
    plan = worker.cache.plan
    assert plan is not None
    plan.steps[:] = [step for step in plan.steps if not (isinstance(step, Copy) and step.name == f"{layer}.down")]
    error = found_within(worker, trainer, EVERY)
    assert f"layers.{layer}.down (from weight {layer}.down): not what was staged" in str(error)
    assert error.since == f"version {error.version - 1}"


def test_all_steps_are_compared_after_the_memory_was_away_and_all_of_each_with_full() -> None:
    for full in (False, True):
        trainer, worker = Trainer(), Worker(Sharded())
        worker.load(trainer.stage(1))
        plan = worker.cache.plan
        assert plan is not None
        plan.steps[:] = []
        worker.seal.away, trainer.memory.seal = not full, "full" if full else "sample"
        with pytest.raises(SealError) as raised:
            worker.load(trainer.stage(2))
        assert f"and {3 * LAYERS + 2 - 3} more" in raised.value.found, "the padding alone is as it was"


def test_two_swapped_shards_are_named() -> None:
    trainer = Trainer()
    workers = [Worker(Sharded(rank, 2), rank) for rank in range(2)]
    for worker in workers:
        worker.load(trainer.stage(1))
    first, second = (worker.model.layers[1].gate_up for worker in workers)

    def swap(model: Any) -> None:
        """When both have copied, as where each has the other's memory."""
        other = second if model is workers[0].model else first
        model.layers[1].gate_up.data.copy_(other.data)

    staged = trainer.stage(2)
    for shard, worker in enumerate(workers):
        worker.pack, worker.seal.away = swap, True
        with pytest.raises(SealError, match=rf"version 2, shard {shard}: layers.1.gate_up \(from weight 1.gate\)"):
            worker.load(staged)


def test_memory_that_changed_while_other_memory_was_away_is_named() -> None:
    worker = Worker(Sharded())
    worker.load(Trainer().stage(1))
    worker.seal.remember([worker.model])
    worker.seal.compare_remembered()
    worker.seal.remember([worker.model])
    worker.model.layers[2].down.data.zero_()
    for _ in range(2):
        with pytest.raises(SealError, match=r"version 1, shard 0: layers.2.down: changed while memory was away"):
            worker.seal.compare_remembered()
    worker.load(Trainer().stage(1))
    worker.seal.compare_remembered()


def test_what_a_kernel_packs_in_place_is_compared_before_that_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    def pack(model: Any) -> None:
        model.layers[0].down.data.copy_(model.layers[0].down.data.flip(0))

    trainer, worker = Trainer(), Worker(Sharded(), pack=pack)
    with caplog.at_level(logging.WARNING):
        for version in range(1, 10):
            worker.load(trainer.stage(version))
    assert [one.getMessage() for one in caplog.records] == [
        "shard 0: sealed only until the engine packs them: layers.0.down"
    ]
    plan = worker.cache.plan
    assert plan is not None
    plan.steps[:] = [step for step in plan.steps if not (isinstance(step, Copy) and step.name == "0.down")]
    assert "layers.0.down" in str(found_within(worker, trainer, EVERY, begin=10))


def test_what_differs_after_a_load_without_a_plan_is_packed_only_where_it_was_before() -> None:
    """The load after a broken seal has no plan, and what then differs anew is no kernel's."""
    overwritten = False

    def change(model: Any) -> None:
        for layer, is_changed in zip(model.layers, (True, overwritten), strict=False):
            if is_changed:
                layer.down.data.copy_(layer.down.data.flip(0))

    trainer, worker = Trainer(), Worker(Sharded(), pack=change)
    for version in range(1, 4):
        worker.load(trainer.stage(version))
    overwritten, worker.cache = True, PlanCache()
    for _ in range(2):
        with pytest.raises(SealError, match=r"version 4, shard 0: layers.1.down \(from weight 1.down\): not what was"):
            worker.load(trainer.stage(4))
        worker.cache = PlanCache()
    overwritten = False
    worker.load(trainer.stage(4))
    assert worker.seal.fitted == 4


def test_loaders_that_compute_are_named_once_as_not_sealed(caplog: pytest.LogCaptureFixture) -> None:
    model = Sharded()
    load = model.load
    model.load = lambda weights: (load(weights), model.norm.data.mul_(2))  # type: ignore[method-assign,func-returns-value]
    trainer, worker = Trainer(), Worker(model)
    with caplog.at_level(logging.WARNING):
        for version in range(1, 4):
            worker.load(trainer.stage(version))
    assert [one.getMessage() for one in caplog.records] == [
        "shard 0: loaded by loaders that compute, whose results are not sealed"
    ]


class Quantized(torch.nn.Module):
    """An engine that keeps a weight in eight bits, with a scale of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.values = torch.nn.Parameter(torch.zeros(96, WIDTH).to(torch.float8_e4m3fn), requires_grad=False)
        self.scale = torch.nn.Parameter(torch.ones(()), requires_grad=False)

    def load(self, weights: Weights) -> None:
        weight = dict(weights)["embed"]
        scale = weight.abs().max() / torch.finfo(torch.float8_e4m3fn).max
        self.scale.data.copy_(scale)
        self.values.data.copy_((weight / scale).to(torch.float8_e4m3fn))


def test_a_quantized_engine_is_named_once_and_what_it_loads_is_sealed_until_then(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer, worker = Trainer(), Worker(Quantized())
    with caplog.at_level(logging.WARNING):
        for version in range(1, 12):
            worker.load(trainer.stage(version))
    assert [one.getMessage() for one in caplog.records] == [
        "shard 0: loaded by loaders that compute, whose results are not sealed"
    ]
    assert worker.cache.plan is None and worker.seal.fitted == 11
    trainer.memory.seal = "full"
    staged = trainer.stage(12)
    assert trainer.memory.file is not None
    os.pwrite(trainer.memory.file, b"\xff\xff\xff\xff", staged.placed[0].offset)
    with pytest.raises(SealError, match=r"version 12, shard 0: the staged memory: block 0 of \d+ of embed is not what"):
        worker.load(staged)


class Rewritten(torch.nn.Module):
    """A parameter that is filled, then written in part twice."""

    def __init__(self) -> None:
        super().__init__()
        self.both = torch.nn.Parameter(torch.zeros(4, 2), requires_grad=False)

    def load(self, weights: Weights) -> None:
        named = dict(weights)
        self.both.data.fill_(0)
        self.both.data[:3].copy_(named["first"])
        self.both.data[2:].copy_(named["second"])


def test_what_later_steps_write_over_is_not_compared() -> None:
    trainer, worker = Trainer(), Worker(Rewritten())
    for version in range(6):
        weights = {"first": torch.full((3, 2), version + 1.0), "second": torch.full((2, 2), version + 9.0)}
        worker.load(trainer.stage(version, weights))
    assert worker.cache.plan is not None
    (final,), unsent = final_steps(worker.cache.plan, [worker.model])
    assert isinstance(final.step, Copy) and final.step.name == "second" and not unsent
    worker.model.both.data[3] = 7.0
    worker.cache.plan.steps[:] = []
    worker.seal.away = True
    with pytest.raises(SealError, match=r"both \(from weight second\)"):
        worker.load(trainer.stage(9, weights))
