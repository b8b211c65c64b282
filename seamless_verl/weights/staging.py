"""One version of the weights in host memory, for other processes of the host to map.

The memory has no name in any file system: it is found through the descriptors of the process that wrote it, as long
as that lives and keeps it, and a killed process leaves nothing behind.
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
    """One weight, by its name in the HF format, and where its bytes begin."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        size = prod(self.shape) * self.dtype.itemsize
        return memory[self.offset : self.offset + size].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class StagedWeights:
    """Where staged weights are, to be sent to processes that map them.

    `host` is the Ray node, `token` what the memory begins with; `peft` is verl's config of an adapter, None where
    these are a model's weights.
    """

    version: int
    host: str
    path: str
    size: int
    token: bytes
    placed: tuple[PlacedWeight, ...]
    peft: Any = None

    def mapped(self) -> list[tuple[str, torch.Tensor]]:
        """Names and weights, which are views of the memory; writing to them changes no other process's view.

        Raises:
            OSError: the process that wrote them is on another host, has ended, or has staged another version.
        """
        file = os.open(self.path, os.O_RDONLY)
        try:  # what was opened stays what it is, whatever the path comes to stand for
            if os.pread(file, TOKEN_BYTES, 0) != self.token:
                raise OSError(f"{self.path} is not version {self.version} any more")
            memory = torch.from_file(f"/proc/self/fd/{file}", shared=False, size=self.size, dtype=torch.uint8)
        finally:
            os.close(file)
        return [(one.name, one.of(memory)) for one in self.placed]


class StagingMemory:
    """Owns the memory of one version: `begin`, `add` its weights, `end`; then other processes map it."""

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
        os.ftruncate(self.file, self.size)  # where the last weight is empty, nothing was written at its place
        path = f"/proc/{os.getpid()}/fd/{self.file}"
        self.weights = StagedWeights(version, self.host, path, self.size, self.token, tuple(self.placed), peft)
        return self.weights

    def of(self, version: int) -> StagedWeights:
        assert self.weights is not None, f"version {version} is asked for, none is staged"
        assert self.weights.version == version, f"version {version} is asked for, {self.weights.version} is staged"
        return self.weights

    def close(self) -> None:
        if self.file is not None:
            os.close(self.file)
        self.file, self.weights, self.placed, self.size = None, None, [], 0


def write_at(file: int, offset: int, data: memoryview) -> int:
    """Writes all of it, though one write takes at most 2 GiB; returns how many bytes there are."""
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done:], offset + done)
    return done


def one_of_each_host(weights: Iterable[StagedWeights | None]) -> list[StagedWeights]:
    return list({one.host: one for one in weights if one is not None}.values())


def mapped_here(staged: Iterable[StagedWeights]) -> tuple[StagedWeights, list[tuple[str, torch.Tensor]]]:
    """The staged weights that this host can map.

    Raises:
        LookupError: there are none, with the reason for each.
    """
    why = []
    for one in staged:
        try:
            return one, one.mapped()
        except OSError as error:
            why.append(f"node {one.host}: {error}")
    raise LookupError(f"this host has no weights in its memory: {'; '.join(why) or 'none are staged'}")
