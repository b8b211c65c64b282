"""One version of the weights in host memory, which other processes of the host can map.

There is one copy on a host. Its memory has no name in a file system: others open it through a descriptor of the process
that made it, so that a killed process leaves nothing behind.

The next version is written over the earlier one, since new pages cost several times what the copy does, and memory that
is pinned for a device must stay where it is. Who stages waits until nobody loads the earlier version
(`weights/commit.py`). A late reader finds another token at the beginning of the memory, and its load has failed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from math import prod
from typing import Any, NamedTuple

import torch

from seamless_verl.weights.host_copies import HostCopies
from seamless_verl.weights.seal import Seal, Sealing, SealMode

TOKEN_BYTES = 16
ALIGNED = 64  # bytes: a cache line, and a multiple of every element's size


@dataclass(frozen=True)
class PlacedWeight:
    """One weight with its name in the HF format, and the `offset` in bytes at which it begins."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def view_in(self, memory: torch.Tensor) -> torch.Tensor:
        return memory[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class StagedWeights:
    """The location of staged weights, which is sent to the processes that map them.

    `host` is the Ray node, `token` the first bytes of the memory. `peft` is verl's config of an adapter, None for a
    model's weights. `seal` is None where none is made.
    """

    version: int
    host: str
    path: str
    size: int
    token: bytes
    placed: tuple[PlacedWeight, ...]
    peft: Any = None
    seal: Seal | None = None

    @property
    def layout(self) -> str:
        """A digest of all names, dtypes, shapes and places."""
        digest = blake2b(digest_size=16)
        for weight in self.placed:
            digest.update(repr(weight).encode())
        return digest.hexdigest()

    def map(self) -> list[tuple[str, torch.Tensor]]:
        """Maps the weights for one use; see `MappedMemory.map`."""
        return MappedMemory().map(self)


class MappedMemory:
    """Owns a process's mapping of the memory of its host, and keeps it from one version to the next.

    For a CUDA device `copies` pins it. Then the mapping is shared, since to pin private memory copies it.
    """

    def __init__(self, copies: HostCopies | None = None) -> None:
        self.copies = copies
        self._memory: torch.Tensor | None = None
        self._file: tuple[int, int, int] | None = None  # device, inode, bytes

    def map(self, staged: StagedWeights) -> list[tuple[str, torch.Tensor]]:
        """Maps the weights: names, and tensors that are views of the memory. Nobody writes to them.

        Raises:
            OSError: the process that wrote them is on another host, has ended, or has staged another version.
        """
        file = os.open(staged.path, os.O_RDONLY if self.copies is None else os.O_RDWR)
        try:  # the descriptor stays valid even if the path is reused
            if os.pread(file, TOKEN_BYTES, 0) != staged.token:
                raise OSError(f"{staged.path} is not version {staged.version} any more")
            memory = self._mapped(file, staged.size)
        finally:
            os.close(file)
        return [(weight.name, weight.view_in(memory)) for weight in staged.placed]

    def check(self, staged: StagedWeights) -> None:
        """Raises OSError if another version was written over these weights after they were mapped."""
        if self._memory is None or bytes(self._memory[:TOKEN_BYTES].numpy()) != staged.token:
            raise OSError(f"version {staged.version} was overwritten in {staged.path} while it was loaded")

    def _mapped(self, file: int, size: int) -> torch.Tensor:
        status, pinned = os.fstat(file), self.copies is not None
        if self._memory is None or self._file != (status.st_dev, status.st_ino, size):
            if self.copies is not None:
                self.copies.unpin()
            self._memory = torch.from_file(f"/proc/self/fd/{file}", shared=pinned, size=size, dtype=torch.uint8)
            self._file = (status.st_dev, status.st_ino, size)
            if self.copies is not None:
                self.copies.pin(self._memory)
        return self._memory


class StagingPlace(NamedTuple):
    """Where the ranks of a host write one version: the owner's descriptor, and the version's token."""

    path: str
    token: bytes


class StagingShare(NamedTuple):
    """A rank's report that it has written its share; `layout` is where it saw all weights of the version, and `sealed`
    has the rows of its share's seal."""

    host: str
    layout: str
    sealed: bytes = b""


Report = StagedWeights | StagingShare | None
"""Of a rank: the host's copy, from the first rank there, or its share in it; None where the host needs none."""


class StagingMemory:
    """Owns the memory of a host. Call `begin`, `add` for each weight, `end`; then other processes can map it.

    Ranks of a host may divide a version: the first one begins, the others `join`, all of them add all weights in the
    same order, and each writes a share of the bytes, with its seal unless `seal` is off. The version is complete when
    all have ended.
    """

    def __init__(self, host: str, copies: HostCopies | None = None) -> None:
        self.host, self.copies = host, copies or HostCopies()
        self.file: int | None = None
        self.path, self.token = "", b""
        self.size = 0
        self.placed: list[PlacedWeight] = []
        self.weights: StagedWeights | None = None
        self.seal: SealMode = "off"
        self._sealing, self._versions = Sealing("off", 0), 0
        self._memory: torch.Tensor | None = None  # what the file had when the version was begun
        self._index, self._shares = 0, [0]

    def begin(self, ranks: int = 1) -> StagingPlace:
        """Drops the earlier version, which nobody may be loading; the first of `ranks` calls it."""
        if self.file is None:
            self.file = os.memfd_create("weights", os.MFD_CLOEXEC)
            self.path = f"/proc/{os.getpid()}/fd/{self.file}"
        place = StagingPlace(self.path, os.urandom(TOKEN_BYTES))
        write_at(self.file, 0, memoryview(place.token))
        self._begin(place, 0, ranks)
        return place

    def join(self, place: StagingPlace, index: int, ranks: int) -> None:
        """Begins as rank `index`, above 0, of those that write to `place`."""
        if self.path != place.path:
            self.close()
            self.file, self.path = os.open(place.path, os.O_RDWR | os.O_CLOEXEC), place.path
        self._begin(place, index, ranks)

    def _begin(self, place: StagingPlace, index: int, ranks: int) -> None:
        assert self.file is not None
        self.token, self.weights, self.placed, self.size = place.token, None, [], TOKEN_BYTES
        self._index, self._shares = index, [0] * ranks
        self._sealing, self._versions = Sealing(self.seal, self._versions), self._versions + 1
        size = os.fstat(self.file).st_size
        if size > TOKEN_BYTES and (self._memory is None or self._memory.nbytes < size):
            self.copies.unpin()
            self._memory = torch.from_file(f"/proc/self/fd/{self.file}", shared=True, size=size, dtype=torch.uint8)
            self.copies.pin(self._memory)

    def add(self, name: str, weight: torch.Tensor) -> None:
        """Copies a weight, if it is in this rank's share; until `end` it must not change."""
        assert self.file is not None and self.weights is None
        placed = PlacedWeight(name, weight.dtype, tuple(weight.shape), -(-self.size // ALIGNED) * ALIGNED)
        self.placed.append(placed)
        self.size = placed.offset + placed.nbytes
        fewest = self._shares.index(min(self._shares))  # the same on every rank
        self._shares[fewest] += placed.nbytes
        if fewest == self._index:
            weight = weight.detach()
            self._write(placed, weight)
            self._sealing.add(len(self.placed) - 1, weight)

    def _write(self, placed: PlacedWeight, weight: torch.Tensor) -> None:
        assert self.file is not None
        if self._memory is not None and self.size <= self._memory.nbytes:
            self.copies.copy(placed.view_in(self._memory), weight)
        else:  # of the first version, or beyond it
            copied = weight.to("cpu").contiguous()
            write_at(self.file, placed.offset, memoryview(copied.view(-1).view(torch.uint8).numpy()))

    def end(self, version: int, peft: Any = None) -> StagedWeights:
        """This rank's share is written. With those of the other ranks, the version can be mapped."""
        assert self.file is not None
        self.copies.finish()
        if os.fstat(self.file).st_size < self.size:  # an empty last weight, or one in another rank's share
            os.truncate(self.file, self.size)
        seal = None
        if self.seal != "off":
            rows = self._sealing.end()
            seal = Seal(version, self.seal == "full", rows, self._sealing.seconds)
        placed = tuple(self.placed)
        self.weights = StagedWeights(version, self.host, self.path, self.size, self.token, placed, peft, seal)
        return self.weights

    def close(self) -> None:
        """The memory is freed when no process maps it any more."""
        self.copies.unpin()
        if self.file is not None:
            os.close(self.file)
        self.file, self.weights, self.placed, self.size, self.path, self._memory = None, None, [], 0, "", None


def write_at(file: int, offset: int, data: memoryview) -> int:
    """Writes all bytes, in several writes since one takes at most 2 GiB; returns their number."""
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done:], offset + done)
    return done


def one_per_host(reports: Iterable[Report]) -> list[StagedWeights]:
    """The staged weights of each host, from the reports of all ranks.

    Raises:
        RuntimeError: ranks that divided a version among them saw different weights, or the same in another order.
    """
    reports = list(reports)
    staged = list({one.host: one for one in reports if isinstance(one, StagedWeights)}.values())
    layouts = {weights.host: weights.layout for weights in staged}
    shares = [one for one in reports if isinstance(one, StagingShare)]
    for share in shares:
        if share.layout != layouts[share.host]:
            raise RuntimeError(f"the trainer's ranks on node {share.host} export different weights: none are staged")
    sealed = {weights.host: b"".join(one.sealed for one in shares if one.host == weights.host) for weights in staged}
    return [one if one.seal is None else replace(one, seal=one.seal.joined(sealed[one.host])) for one in staged]


def mapped_of_host(staged: Iterable[StagedWeights], host: str) -> list[tuple[str, torch.Tensor]]:
    """The weights staged on this Ray node; none where none are."""
    return next((weights.map() for weights in staged if weights.host == host), [])


def map_on_this_host(
    staged: Sequence[StagedWeights], memory: MappedMemory | None = None
) -> tuple[StagedWeights, list[tuple[str, torch.Tensor]]]:
    """Maps the first of these staged weights that this host can map.

    Raises:
        LookupError: it can map none; gives the reason for each.
    """
    problems = []
    for weights in staged:
        try:
            return weights, (memory or MappedMemory()).map(weights)
        except OSError as error:
            problems.append(f"node {weights.host}: {error}")
    raise LookupError(f"this host has no weights in its memory: {'; '.join(problems) or 'none are staged'}")
