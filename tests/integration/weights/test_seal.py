"""The seal of staged weights: one changed byte is found and named, and nothing else ever is."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seamless_verl.errors import SealError
from seamless_verl.replica.seal import ResidentSeal
from seamless_verl.weights.seal import BLOCK, EVERY, Seal, SealMode, blocks_of, digests_of
from seamless_verl.weights.staging import (
    MappedMemory,
    StagedWeights,
    StagingMemory,
    StagingShare,
    map_on_this_host,
    one_per_host,
)

pytestmark = pytest.mark.integration
Weights = dict[str, torch.Tensor]


def drawn(seed: int = 0) -> Weights:
    """Weights of several sizes and dtypes, the largest of several blocks."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"large": (300, 257), "small": (5, 3), "scalar": (), "empty": (0, 4), "odd": (7,)}
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return weights | {"half": weights["large"].to(torch.bfloat16), "turned": weights["large"].T}


def staged_in(memory: StagingMemory, weights: Weights, version: int, seal: SealMode = "sample") -> StagedWeights:
    memory.seal = seal
    memory.begin()
    for name, weight in weights.items():
        memory.add(name, weight)
    return memory.end(version)


def mapped(staged: StagedWeights, memory: MappedMemory, shard: int = 0, shards: int = 1) -> None:
    """As a worker does it."""
    ResidentSeal(shard).mapped(*map_on_this_host([staged], memory), memory, shards)


def flip(memory: StagingMemory, place: int, bit: int = 0) -> None:
    assert memory.file is not None
    was = os.pread(memory.file, 1, place)[0]
    os.pwrite(memory.file, bytes([was ^ 1 << bit]), place)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**9), st.integers(0, 7))
def test_one_flipped_bit_is_found_and_named(where: int, bit: int) -> None:
    memory, reader = StagingMemory("here"), MappedMemory()
    weights = drawn()
    staged_in(memory, weights, 1)
    staged = staged_in(memory, weights, 2, "full")
    mapped(staged, reader)
    filled = [one for one in staged.placed if one.nbytes]
    weight = filled[where % len(filled)]
    inside = where % weight.nbytes
    flip(memory, weight.offset + inside, bit)
    block = rf"block {inside // BLOCK} of \d+ of {weight.name} is"
    with pytest.raises(SealError, match=rf"^version 2, shard 0: the staged memory: {block}") as raised:
        mapped(staged, reader)
    assert raised.value.since == "none so far"
    memory.close()


def test_each_weight_is_seen_within_a_few_versions_and_the_first_one_whole() -> None:
    memory, weights = StagingMemory("here"), {f"{i}": torch.randn(100, 1000) for i in range(11)}
    seals = [staged_in(memory, weights, version).seal for version in range(20)]
    assert all(seal is not None for seal in seals)
    tables = [seal.table for seal in seals if seal is not None]
    assert len(tables[0]) == sum(blocks_of(weight) for weight in weights.values())
    for begin in range(1, len(tables) - EVERY):
        seen = {int(row[0]) for table in tables[begin : begin + EVERY] for row in table}
        assert seen == set(range(11)), f"from version {begin} on"
    assert len({tuple(map(tuple, table[:, :2].tolist())) for table in tables}) > EVERY + 1, "blocks are not drawn anew"
    assert max(len(table) for table in tables[1:]) < len(tables[0]) / EVERY


def test_without_a_seal_none_is_made() -> None:
    staged = staged_in(memory := StagingMemory("here"), drawn(), 1, "off")
    assert staged.seal is None
    flip(memory, staged.placed[0].offset)
    mapped(staged, MappedMemory())


def test_ranks_seal_their_shares_and_shards_look_at_all_of_them() -> None:
    weights, memories = drawn(), [StagingMemory("here") for _ in range(3)]
    for memory in memories:
        memory.seal = "full"
    place = memories[0].begin(3)
    for i, memory in enumerate(memories[1:], 1):
        memory.join(place, i, 3)
    for memory in memories:
        for name, weight in weights.items():
            memory.add(name, weight)
    first, *others = [memory.end(4) for memory in memories]
    rows = [one.seal.rows for one in others if one.seal is not None]
    shares = [StagingShare("here", one.layout, row) for one, row in zip(others, rows, strict=True)]
    assert all(rows), "a rank has no share"
    (staged,) = one_per_host([first, *shares])
    assert staged.seal is not None
    assert len(staged.seal.table) == sum(blocks_of(weight) for weight in weights.values())
    for shard in range(2):
        mapped(staged, MappedMemory(), shard, 2)
    flip(memories[0], staged.placed[-1].offset)
    errors = []
    for shard in range(2):
        try:
            mapped(staged, MappedMemory(), shard, 2)
        except SealError as error:
            errors.append(error)
    assert len(errors) == 1 and "turned" in str(errors[0])


def test_a_wrong_version_number_is_named() -> None:
    """Also that of a host that got the weights over a network, and has the seal of what was sent."""
    staged = staged_in(StagingMemory("here"), drawn(), 6)
    with pytest.raises(SealError, match="version 7, shard 0: the version: its seal is of version 6"):
        mapped(replace(staged, version=7), MappedMemory())


def test_weights_of_another_version_under_this_seal_are_named() -> None:
    memory = StagingMemory("here")
    sealed = staged_in(memory, drawn(1), 1).seal
    stale = staged_in(memory, drawn(0), 1)
    with pytest.raises(SealError, match=r"block 0 of \d+ of large is not what the trainer had"):
        mapped(replace(stale, seal=sealed), MappedMemory())


def test_memory_that_is_written_again_meanwhile_is_no_broken_seal() -> None:
    memory, reader = StagingMemory("here"), MappedMemory()
    staged = staged_in(memory, drawn(0), 1)
    weights = reader.map(staged)
    staged_in(memory, drawn(1), 2)
    with pytest.raises(OSError, match="version 1 was overwritten"):
        ResidentSeal(0).mapped(staged, weights, reader, 1)


def test_a_digest_does_not_depend_on_where_a_weight_lies() -> None:
    weight = torch.randn(300, 257, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    blocks = range(blocks_of(weight))
    whole = torch.empty(weight.numel() + 1, dtype=weight.dtype)
    whole[1:] = weight.flatten()
    for other in (whole[1:].view(300, 257), weight.T.contiguous().T, torch.stack([weight, weight], -1)[..., 1]):
        assert torch.equal(digests_of(other, blocks), digests_of(weight, blocks))


def test_no_false_alarm_in_many_versions() -> None:
    memory, reader = StagingMemory("here"), MappedMemory()
    checked = 0
    for version in range(300):
        staged = staged_in(memory, drawn(version), version)
        mapped(staged, reader)
        assert isinstance(staged.seal, Seal)
        checked += len(staged.seal.table)
    assert checked > 300
