"""Weights in memory that other processes map: every shape and dtype, and what happens when they are gone."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

if TYPE_CHECKING:
    import torch

    from seamless_verl.weights.staging import StagedWeights, StagingMemory

pytestmark = pytest.mark.integration
KINDS = ["float32", "bfloat16", "float16", "int64", "uint8", "float8_e4m3fn"]
SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=6)


def written(memory: StagingMemory, weights: dict[str, torch.Tensor], version: int = 1) -> StagedWeights:
    memory.begin()
    for name, weight in weights.items():
        memory.add(name, weight)
    return memory.end(version)


def drawn(shapes: list[tuple[int, ...]], kind: torch.dtype, last: int) -> dict[str, torch.Tensor]:
    import torch

    numbers = [torch.randint(0, 100, shape).to(kind) for shape in shapes]
    return {f"{i}": number for i, number in enumerate(numbers)} | {"last": torch.ones(last).to(kind)}


@settings(deadline=None)  # the first one imports torch
@given(SHAPES, st.sampled_from(KINDS), st.integers(0, 3))
def test_what_is_read_is_what_was_written(shapes: list[tuple[int, ...]], name_of_kind: str, last: int) -> None:
    import torch

    from seamless_verl.weights.staging import ALIGNED, StagingMemory

    kind = getattr(torch, name_of_kind)
    weights, memory = drawn(shapes, kind, last), StagingMemory("a")
    staged: StagedWeights = pickle.loads(pickle.dumps(written(memory, weights)))
    read = dict(staged.map())
    assert list(read) == list(weights)
    for name, weight in weights.items():
        assert read[name].dtype is kind and read[name].shape == weight.shape
        assert torch.equal(read[name].reshape(-1).view(torch.uint8), weight.reshape(-1).view(torch.uint8))
    assert all(weight.offset % ALIGNED == 0 for weight in staged.placed)
    memory.close()


def test_a_slice_is_written_as_it_is() -> None:
    import torch

    from seamless_verl.weights.staging import StagingMemory

    whole, memory = torch.arange(24.0).view(4, 6), StagingMemory("a")
    (_, read), (_, turned) = written(memory, {"slice": whole[1:3, ::2], "turned": whole.T}).map()
    assert torch.equal(read, whole[1:3, ::2]) and torch.equal(turned, whole.T)


def test_neither_side_can_change_what_the_other_sees() -> None:
    import torch

    from seamless_verl.weights.staging import StagingMemory

    original, memory = torch.zeros(8), StagingMemory("a")
    staged = written(memory, {"w": original})
    original.fill_(1.0)
    (_, read), *_ = staged.map()
    read.fill_(2.0)
    assert dict(staged.map())["w"].tolist() == [0.0] * 8


READ = "import array, sys; print(sum(array.array('f', open(sys.argv[1], 'rb').read(int(sys.argv[2]))[64:])))"


def test_another_process_reads_them_and_a_late_reader_finds_out() -> None:
    """The next version is written over the earlier one; who still loads that one learns it when it has loaded."""
    import torch

    from seamless_verl.weights.staging import MappedMemory, StagingMemory

    memory = StagingMemory("a")
    staged = written(memory, {"w": torch.full((1 << 16,), 0.5)})
    reader = subprocess.run(
        [sys.executable, "-c", READ, staged.path, str(staged.size)], capture_output=True, check=True
    )
    assert float(reader.stdout) == 1 << 15
    late, reader_memory = MappedMemory(), MappedMemory()
    late.map(staged)
    late.check(staged)
    memory.begin()
    with pytest.raises(OSError, match=r"version 1 was overwritten in .* while it was loaded"):
        late.check(staged)
    memory.add("w", torch.zeros(4))
    second = memory.end(2)
    assert dict(reader_memory.map(second))["w"].tolist() == [0.0] * 4
    reader_memory.check(second)


def test_the_memory_and_its_mappings_stay_where_they_are() -> None:
    import torch

    from seamless_verl.weights.staging import MappedMemory, StagingMemory

    memory, mapped = StagingMemory("a"), MappedMemory()
    places = set()
    for version in range(4):
        staged = written(memory, {"a": torch.full((5,), float(version)), "b": torch.arange(9) + version}, version)
        weights = dict(mapped.map(staged))
        assert weights["a"].tolist() == [float(version)] * 5 and weights["b"].tolist() == [*range(version, version + 9)]
        places.add((staged.path, weights["a"].data_ptr()))
    assert len(places) == 1


@settings(deadline=None, max_examples=50)
@given(st.lists(SHAPES, min_size=2, max_size=4), st.integers(1, 3))
def test_ranks_of_a_host_divide_versions_of_any_size(versions: list[list[tuple[int, ...]]], ranks: int) -> None:
    import torch

    from seamless_verl.weights.staging import MappedMemory, StagingMemory, StagingShare, one_per_host

    memories, mapped = [StagingMemory("a") for _ in range(ranks)], MappedMemory()
    for version, shapes in enumerate(versions):
        weights = drawn(shapes, torch.float32, version)
        place = memories[0].begin(ranks)
        for index in range(1, ranks):
            memories[index].join(place, index, ranks)
        ended = []
        for memory in reversed(memories):  # whoever is first
            for name, weight in weights.items():
                memory.add(name, weight)
            ended.append(memory.end(version))
        shares = [StagingShare("a", staged.layout) for staged in ended[:-1]]
        (staged,) = one_per_host([*shares, ended[-1]])
        read = dict(mapped.map(staged))
        assert all(torch.equal(read[name], weight) for name, weight in weights.items())
    for memory in memories:
        memory.close()


def test_ranks_that_export_different_weights_are_refused() -> None:
    import torch

    from seamless_verl.weights.staging import StagingMemory, StagingShare, one_per_host

    staged = written(StagingMemory("a"), {"w": torch.zeros(2)})
    other = written(StagingMemory("a"), {"w": torch.zeros(3)})
    with pytest.raises(RuntimeError, match="ranks on node a export different weights"):
        one_per_host([staged, StagingShare("a", other.layout), None])


def test_a_version_that_is_gone_is_not_mistaken_for_its_successor() -> None:
    import torch

    from seamless_verl.weights.staging import StagingMemory, map_on_this_host, one_per_host

    first, second = StagingMemory("a"), StagingMemory("b")
    gone = written(first, {"w": torch.zeros(1)})
    newer, other = written(first, {"w": torch.ones(1)}, version=2), written(second, {"w": torch.ones(1)})
    assert gone.path == newer.path
    assert map_on_this_host([gone, other])[0] is other
    with pytest.raises(OSError, match="is not version 1 any more"):
        gone.map()
    first.close()
    with pytest.raises(LookupError, match=r"no weights in its memory: node a: .*is not version 1.*node a: .*No such"):
        map_on_this_host([replace(gone, path=other.path), newer])
    with pytest.raises(LookupError, match="none are staged"):
        map_on_this_host([])
    assert one_per_host([None, other, gone, newer]) == [other, newer]


def test_nothing_is_left_of_versions_that_nobody_maps() -> None:
    import torch

    from seamless_verl.weights.staging import StagingMemory

    def mapped() -> int:
        return sum("memfd:weights" in line for line in Path("/proc/self/maps").read_text().splitlines())

    def open_here() -> int:
        """Descriptors of staged weights: what else this process has open is other tests'."""
        found = list[str]()
        for descriptor in Path("/proc/self/fd").iterdir():
            with suppress(FileNotFoundError):  # the one by which the folder is read
                found.append(os.readlink(descriptor))
        return sum("memfd:weights" in target for target in found)

    gc.collect()  # of other tests
    memory, before = StagingMemory("a"), open_here()
    for version in range(5):
        assert dict(written(memory, {"w": torch.zeros(9)}, version).map())["w"].sum() == 0
    gc.collect()
    assert mapped() == 1 and open_here() == before + 1, "its own mapping, to write the next one"
    memory.close()
    assert mapped() == 0 and open_here() == before


def test_the_weights_of_a_host_are_found_and_elsewhere_there_are_none() -> None:
    """What each rank sends or relays: verl's relays must walk the same weights as its sender."""
    import torch

    from seamless_verl.weights.staging import StagingMemory, mapped_of_host

    here, there = StagingMemory("here"), StagingMemory("there")
    staged = [written(here, {"a": torch.ones(3)}), written(there, {"a": torch.zeros(3)})]
    for _ in range(2):  # by two ranks of the host
        ((name, weight),) = mapped_of_host(staged, "here")
        assert name == "a" and weight.tolist() == [1.0] * 3
    assert mapped_of_host(staged, "elsewhere") == []


def test_a_staged_version_is_as_large_as_the_memory_plan_says(nano: Path) -> None:
    import json

    import torch
    from safetensors.torch import load_file

    from seamless_verl.resources.memory import staged_bytes
    from seamless_verl.resources.model_facts import ModelFacts
    from seamless_verl.weights.staging import ALIGNED, StagingMemory

    facts = ModelFacts.read(json.loads((nano / "model" / "config.json").read_text()))
    assert facts is not None
    tensors = load_file(nano / "model" / "model.safetensors")
    memory = StagingMemory("a")
    for version in (1, 2):  # the second one over the first
        staged = written(memory, {name: weight.to(torch.bfloat16) for name, weight in tensors.items()}, version)
        assert memory.file is not None and os.fstat(memory.file).st_size == staged.size
        assert 0 <= staged.size - staged_bytes(facts) <= ALIGNED * (len(tensors) + 1)
    memory.close()
