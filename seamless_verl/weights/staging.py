"""One version of the weights in host memory, which other processes of the host can map.

The memory has no name in a file system. Other processes open it through a descriptor of the process that wrote it, as
long as that process lives and keeps it. So a killed process leaves nothing behind.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

TOKEN_BYTES = 16
ALIGNED = 64  # bytes: a cache line, and a multiple of every element's size


@dataclass(frozen=True)
class PlacedWeight:
    """One weight with its name in the HF format, and the `offset` in bytes at which it begins."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    def view_in(self, memory: torch.Tensor) -> torch.Tensor:
        size = prod(self.shape) * self.dtype.itemsize
        return memory[self.offset : self.offset + size].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class StagedWeights:
    """The location of staged weights, which is sent to the processes that map them.

    `host` is the Ray node, `token` the first bytes of the memory. `peft` is verl's config of an adapter, None for a
    model's weights.
    """

    version: int
    host: str
    path: str
    size: int
    token: bytes
    placed: tuple[PlacedWeight, ...]
    peft: Any = None

    def map(self) -> list[tuple[str, torch.Tensor]]:
        """Maps the weights: names, and tensors that are private views of the memory.

        Raises:
            OSError: the process that wrote them is on another host, has ended, or has staged another version.
        """
        file = os.open(self.path, os.O_RDONLY)
        try:  # the descriptor stays valid even if the path is reused
            if os.pread(file, TOKEN_BYTES, 0) != self.token:
                raise OSError(f"{self.path} is not version {self.version} any more")
            memory = torch.from_file(f"/proc/self/fd/{file}", shared=False, size=self.size, dtype=torch.uint8)
        finally:
            os.close(file)
        return [(weight.name, weight.view_in(memory)) for weight in self.placed]


class StagingMemory:
    """Owns the memory of one version. Call `begin`, `add` for each weight, `end`; then other processes can map it."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.file: int | None = None
        self.token = b""
        self.placed: list[PlacedWeight] = []
        self.size = 0
        self.weights: StagedWeights | None = None

    def begin(self) -> None:
        """Drops the earlier version, whose memory is freed when no process maps it any more."""
        self.close()
        self.file, self.token = os.memfd_create("weights", os.MFD_CLOEXEC), os.urandom(TOKEN_BYTES)
        self.size = write_at(self.file, 0, memoryview(self.token))

    def add(self, name: str, weight: torch.Tensor) -> None:
        """Copies a weight; later changes of the original do not reach the copy."""
        assert self.file is not None and self.weights is None
        copied = weight.detach().to("cpu").contiguous()
        offset = -(-self.size // ALIGNED) * ALIGNED
        self.size = offset + write_at(self.file, offset, memoryview(copied.view(-1).view(torch.uint8).numpy()))
        self.placed.append(PlacedWeight(name, copied.dtype, tuple(copied.shape), offset))

    def end(self, version: int, peft: Any = None) -> StagedWeights:
        assert self.file is not None
        os.ftruncate(self.file, self.size)  # an empty last weight has written nothing
        path = f"/proc/{os.getpid()}/fd/{self.file}"
        self.weights = StagedWeights(version, self.host, path, self.size, self.token, tuple(self.placed), peft)
        return self.weights

    def get(self, version: int) -> StagedWeights:
        assert self.weights is not None, f"version {version} is requested, none is staged"
        assert self.weights.version == version, f"version {version} is requested, {self.weights.version} is staged"
        return self.weights

    def close(self) -> None:
        if self.file is not None:
            os.close(self.file)
        self.file, self.weights, self.placed, self.size = None, None, [], 0


def write_at(file: int, offset: int, data: memoryview) -> int:
    """Writes all bytes, in several writes since one takes at most 2 GiB; returns their number."""
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done:], offset + done)
    return done


def one_per_host(weights: Iterable[StagedWeights | None]) -> list[StagedWeights]:
    return list({staged.host: staged for staged in weights if staged is not None}.values())


def map_on_this_host(staged: Iterable[StagedWeights]) -> tuple[StagedWeights, list[tuple[str, torch.Tensor]]]:
    """Maps the first of these staged weights that this host can map.

    Raises:
        LookupError: it can map none; gives the reason for each.
    """
    problems = []
    for weights in staged:
        try:
            return weights, weights.map()
        except OSError as error:
            problems.append(f"node {weights.host}: {error}")
    raise LookupError(f"this host has no weights in its memory: {'; '.join(problems) or 'none are staged'}")
