"""The seal of a staged version: digests of blocks of its weights, made of the trainer's own tensors.

A replica makes them again of the memory that it maps, before it loads. So a byte that changed between the trainer's
weights and the memory of a host is found, and named by version, weight and block; also on hosts that got the weights
over a network. By default blocks are drawn, anew for each version: some of each weight within `EVERY` versions, at
least `1 / SHARE` of all. The first version of a process has all.

A digest is the sum of a block's 64-bit words, each times an odd number of its place, modulo 2^64: one word that changed
always changes it, and a device gives the same as the host.
"""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby, islice
from operator import itemgetter
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

SealMode: TypeAlias = Literal["sample", "full", "off"]
Weights = Sequence[tuple[str, torch.Tensor]]
BLOCK = 1 << 13  # bytes
WORD = 8
EVERY = 8  # versions, within which each weight is seen
SHARE = 1024  # of so many blocks one is seen in a version, at least


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
        for index, rows in groupby(self.table[share::shares].tolist(), key=itemgetter(0)):
            (name, weight), (_, blocks, digests) = weights[index], zip(*rows, strict=True)
            for block, now, was in zip(blocks, host_digests(weight, blocks), digests, strict=True):
                if now != was:
                    return f"block {block} of {blocks_of(weight)} of {name} is not what the trainer had"
        return None


class Sealing:
    """Makes the rows of one version's seal while it is staged; `number` counts the versions of this process."""

    def __init__(self, mode: SealMode, number: int) -> None:
        self.number, self.seconds = number, 0.0
        self.is_off, self.is_whole = mode == "off", mode == "full" or number == 0
        self._random = random.Random(number)
        self._found = list[tuple[int, Sequence[int]]]()  # weights and their blocks
        self._digests = list[list[int] | torch.Tensor]()  # of these, where they are

    def add(self, index: int, weight: torch.Tensor) -> None:
        """Makes digests of a weight, the `index`th of the version; on a device they may be made later."""
        if self.is_off or ((index + self.number) % EVERY and not self.is_whole):
            return
        began = time.perf_counter()
        blocks = self.drawn(weight)
        self._found.append((index, blocks))
        self._digests.append((host_digests if weight.device.type == "cpu" else digests_of)(weight, blocks))
        self.seconds += time.perf_counter() - began

    def drawn(self, weight: torch.Tensor) -> Sequence[int]:
        """Those of a weight's blocks that the seal has."""
        blocks = blocks_of(weight)
        return range(blocks) if self.is_whole else self._random.sample(range(blocks), -(-blocks * EVERY // SHARE))

    def end(self) -> bytes:
        """The rows of all that was added."""
        began = time.perf_counter()
        on_device = [one for one in self._digests if isinstance(one, torch.Tensor)]
        copied = iter(torch.cat(on_device).tolist() if on_device else [])  # waits for a device once
        digests = [
            digest
            for one in self._digests
            for digest in (islice(copied, len(one)) if isinstance(one, torch.Tensor) else one)
        ]
        places = [(index, block) for index, blocks in self._found for block in blocks]
        rows = np.array([(*place, digest) for place, digest in zip(places, digests, strict=True)], dtype=np.int64)
        self.seconds += time.perf_counter() - began
        return rows.tobytes()


def blocks_of(weight: torch.Tensor) -> int:
    return -(-weight.nbytes // BLOCK)


def digests_of(weight: torch.Tensor, blocks: Sequence[int]) -> torch.Tensor:
    """Digests of a weight's blocks, int64 [blocks], on its device; each block has its elements in their order."""
    if weight.device.type == "cpu":
        return torch.tensor(host_digests(weight, blocks), dtype=torch.int64)
    numbers, count = factors(str(weight.device)), BLOCK // weight.itemsize
    words = (filled(part_of(weight, block * count, count)) for block in blocks)
    return torch.stack([(one * numbers[: one.numel()]).sum() for one in words])


def host_digests(weight: torch.Tensor, blocks: Sequence[int]) -> list[int]:
    """The same of a weight on the host, by numpy: torch's views of small pieces cost several times what a look does."""
    if weight.is_contiguous():
        size, address = weight.nbytes, weight.data_ptr()
        return [digest_at(address + block * BLOCK, min(BLOCK, size - block * BLOCK)) for block in blocks]
    count = BLOCK // weight.itemsize
    parts = (part_of(weight, block * count, count) for block in blocks)
    return [digest_at(part.data_ptr(), part.nbytes) for part in parts]


def digest_at(address: int, count: int) -> int:
    """The digest of so many bytes of the host's memory."""
    part = np.frombuffer((ctypes.c_uint8 * count).from_address(address), np.uint8)
    if count % WORD:
        part = np.pad(part, (0, -count % WORD))
    return int(np.dot(part.view(np.int64), host_factors()[: len(part) // WORD]))  # several times as fast as torch's


def filled(part: torch.Tensor) -> torch.Tensor:
    """A block's elements as int64 [words]; the last word is filled with zeros."""
    part = part.view(torch.uint8)
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


@cache
def host_factors() -> Any:
    return factors("cpu").numpy()
