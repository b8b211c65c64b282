"""Weights in memory that other processes map: every shape and dtype, and what happens when they are gone."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
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


def test_another_process_reads_them_and_what_is_mapped_outlives_the_next_version() -> None:
    import torch

    from seamless_verl.weights.staging import StagingMemory

    memory = StagingMemory("a")
    staged = written(memory, {"w": torch.full((1 << 16,), 0.5)})
    reader = subprocess.run(
        [sys.executable, "-c", READ, staged.path, str(staged.size)], capture_output=True, check=True
    )
    assert float(reader.stdout) == 1 << 15
    mapped = dict(staged.map())
    written(memory, {"w": torch.zeros(4)}, version=2)
    assert mapped["w"].sum() == 1 << 15
    assert dict(memory.get(2).map())["w"].tolist() == [0.0] * 4


def test_only_the_staged_version_is_given() -> None:
    import torch

    from seamless_verl.weights.staging import StagingMemory

    memory = StagingMemory("a")
    with pytest.raises(AssertionError, match="version 3 is requested, none is staged"):
        memory.get(3)
    written(memory, {"w": torch.zeros(1)}, version=2)
    with pytest.raises(AssertionError, match="version 3 is requested, 2 is staged"):
        memory.get(3)


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

    memory, before = StagingMemory("a"), len(os.listdir("/proc/self/fd"))
    for version in range(5):
        assert dict(written(memory, {"w": torch.zeros(9)}, version).map())["w"].sum() == 0
    gc.collect()
    assert mapped() == 0 and len(os.listdir("/proc/self/fd")) == before + 1
