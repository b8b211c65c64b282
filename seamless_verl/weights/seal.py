"""The seal of a staged version: digests of blocks of its weights, made of the trainer's own tensors.

A replica makes them again of the memory that it maps, before it loads. So a byte that changed between the trainer's
weights and the memory of a host is found, and named by version, weight and block; also on hosts that got the weights
over a network. By default blocks are drawn, anew for each version: some of each weight within `EVERY` versions, at
least `1 / SHARE` of all. The first version of a process has all.

A digest is the sum of a block's 64-bit words, each times an odd number of its place, modulo 2^64: one word that changed
always changes it, and a device gives the same as the host.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

SealMode: TypeAlias = Literal["sample", "full", "off"]
Weights = Sequence[tuple[str, torch.Tensor]]
BLOCK = 1 << 16  # bytes
WORD = 8
EVERY = 4  # versions, within which each weight is seen
SHARE = 128  # of so many blocks one is seen in a version, at least


@dataclass(frozen=True)
class Seal:
    """The digests of one version. `rows` is int64 [blocks, 3]: a weight's place in the order of staging, its block, the
    digest. With `full` replicas compare all that they load, else a share. `seconds` is what the digests took."""

    version: int
    full: bool
    rows: bytes
    seconds: float = 0.0

    @property
    def table(self) -> Any:
        return np.frombuffer(self.rows, dtype=np.int64).reshape(-1, 3)

    @property
    def nbytes(self) -> int:
        """Of weights that it covers, at most."""
        return len(self.table) * BLOCK

    def joined(self, rows: bytes) -> Seal:
        """With another rank's share of the digests."""
        return replace(self, rows=self.rows + rows)

    def difference(self, weights: Weights, share: int = 0, shares: int = 1) -> str | None:
        """What of `weights`, in the order of staging, is not what the trainer had, in one share of the blocks."""
        for index, block, digest in self.table[share::shares].tolist():
            name, weight = weights[index]
            if int(digests_of(weight, [block])[0]) != digest:
                return f"block {block} of {blocks_of(weight)} of {name} is not what the trainer had"
        return None


class Sealing:
    """Makes the rows of one version's seal while it is staged; `number` counts the versions of this process."""

    def __init__(self, mode: SealMode, number: int) -> None:
        self.mode, self.number, self.seconds = mode, number, 0.0
        self._random = random.Random(number)
        self._found = list[tuple[int, Sequence[int], torch.Tensor]]()  # weight, blocks, their digests where it is

    def add(self, index: int, weight: torch.Tensor) -> None:
        """Makes digests of a weight, the `index`th of the version; on a device they may be made later."""
        began = time.perf_counter()
        if blocks := self.drawn(index, blocks_of(weight)):
            self._found.append((index, blocks, digests_of(weight, blocks)))
        self.seconds += time.perf_counter() - began

    def drawn(self, index: int, blocks: int) -> Sequence[int]:
        """Those of a weight's blocks that the seal has."""
        if self.mode == "off":
            return ()
        if self.mode == "full" or self.number == 0:
            return range(blocks)
        if (index + self.number) % EVERY:
            return ()
        return self._random.sample(range(blocks), -(-blocks * EVERY // SHARE))

    def end(self) -> bytes:
        """The rows of all that was added."""
        began = time.perf_counter()
        digests = torch.cat([found for *_, found in self._found]).cpu().numpy() if self._found else ()
        places = [(index, block) for index, blocks, _ in self._found for block in blocks]
        rows = np.array([(*place, digest) for place, digest in zip(places, digests, strict=True)], dtype=np.int64)
        self.seconds += time.perf_counter() - began
        return rows.tobytes()


def blocks_of(weight: torch.Tensor) -> int:
    return -(-weight.nbytes // BLOCK)


def digests_of(weight: torch.Tensor, blocks: Sequence[int]) -> torch.Tensor:
    """Digests of a weight's blocks, int64 [blocks], on its device."""
    numbers = factors(str(weight.device))
    if weight.device.type == "cpu":  # several times as fast as torch's product
        words = (words_of(weight, block).numpy() for block in blocks)
        return torch.tensor([int(np.dot(one, numbers.numpy()[: len(one)])) for one in words], dtype=torch.int64)
    return torch.stack([(one * numbers[: one.numel()]).sum() for one in (words_of(weight, block) for block in blocks)])


def words_of(weight: torch.Tensor, block: int) -> torch.Tensor:
    """A block of a weight in the order of its elements, int64 [words]; the last one is filled with zeros."""
    part = part_of(weight, block * BLOCK // weight.itemsize, BLOCK // weight.itemsize).view(torch.uint8)
    if part.numel() % WORD or part.storage_offset() % WORD:
        part = torch.nn.functional.pad(part, (0, -part.numel() % WORD)).clone()
    return part.view(torch.int64)


def part_of(weight: torch.Tensor, begin: int, count: int) -> torch.Tensor:
    """At most `count` elements from the `begin`th on, in their order; copies no more than their rows."""
    if not weight.is_contiguous():
        row = weight[0].numel()
        first = begin // row
        weight, begin = weight[first : -(-(begin + count) // row)], begin - first * row
    return weight.reshape(-1)[begin : begin + count].contiguous()


@cache
def factors(device: str) -> torch.Tensor:
    """An odd number for each place in a block, int64 [words]."""
    drawn = random.Random(0)
    return torch.tensor([drawn.getrandbits(63) | 1 for _ in range(BLOCK // WORD)], device=device)
