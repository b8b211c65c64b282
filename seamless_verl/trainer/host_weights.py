"""One version of the weights in host memory that other processes of the host map, by the file it is.

The memory has no name in any file system: it is found through the descriptors of the process that wrote it, as
long as that lives and keeps it, and a killed process leaves nothing behind.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

ALIGNED = 64  # bytes: a cache line, and a multiple of every element's size


@dataclass(frozen=True)
class Placed:
    """One weight, by its name in the HF format, and where its bytes begin."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        size = prod(self.shape) * self.dtype.itemsize
        return memory[self.offset : self.offset + size].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class HostWeights:
    """What may be sent to whoever is to map it: not the weights, but where they are. `peft` is verl's config of an
    adapter, None where these are a model's weights."""

    version: int
    host: str
    path: str
    size: int
    placed: tuple[Placed, ...]
    peft: Any = None

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and weights, which are views of the mapped memory; writing to them changes nobody else's.

        Raises:
            OSError: whoever wrote them is gone, or has gone on to another version.
        """
        memory = torch.from_file(self.path, shared=False, size=self.size, dtype=torch.uint8)
        return ((one.name, one.of(memory)) for one in self.placed)


class HostMemory:
    """Owns the memory of one version: `begin`, `add` its weights, `end`; then those who map it load it."""

    def __init__(self) -> None:
        self.file: int | None = None
        self.placed: list[Placed] = []
        self.size = 0
        self.weights: HostWeights | None = None

    def begin(self) -> None:
        """Forgets the earlier version, whose memory goes when nobody maps it any more."""
        if self.file is not None:
            os.close(self.file)
        self.weights, self.placed, self.size = None, [], 0
        self.file = os.memfd_create("weights", os.MFD_CLOEXEC)

    def add(self, name: str, weight: torch.Tensor) -> None:
        """Copies it: later changes of the original do not reach the copy."""
        assert self.file is not None and self.weights is None
        copied = weight.detach().to("cpu").contiguous()
        offset = -(-self.size // ALIGNED) * ALIGNED
        self.size = offset + write_at(self.file, offset, memoryview(copied.view(-1).view(torch.uint8).numpy()))
        self.placed.append(Placed(name, copied.dtype, tuple(copied.shape), offset))

    def end(self, version: int, peft: Any = None) -> HostWeights:
        path = f"/proc/{os.getpid()}/fd/{self.file}"
        self.weights = HostWeights(version, socket.gethostname(), path, self.size, tuple(self.placed), peft)
        return self.weights

    def of(self, version: int) -> HostWeights:
        assert self.weights is not None, f"version {version} is asked for, none is staged"
        assert self.weights.version == version, f"version {version} is asked for, {self.weights.version} is staged"
        return self.weights


def write_at(file: int, offset: int, data: memoryview) -> int:
    """Write all of it, though one write takes at most 2 GiB; how many bytes there are."""
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done:], offset + done)
    return done


def here(weights: Iterable[HostWeights]) -> HostWeights:
    """Those that this host can map.

    Raises:
        LookupError: there are none.
    """
    host, staged = socket.gethostname(), list(weights)
    for one in staged:
        if one.host == host and os.path.exists(one.path):  # whoever wrote it lives
            return one
    raise LookupError(f"host {host} has no weights in its memory; staged were {[(o.host, o.path) for o in staged]}")
