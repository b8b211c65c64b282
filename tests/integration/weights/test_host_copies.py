"""Copies from a device to the host: what is called of CUDA and when, and that a host needs none of it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch

pytestmark = pytest.mark.integration
MIB = 1 << 20


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.name = cuda, ""

    def record(self, stream: str) -> None:
        self.name = f"copy {len(self.cuda.recorded)}"
        self.cuda.recorded.append(self.name)
        self.cuda.calls.append(f"{self.name} on {stream}")

    def synchronize(self) -> None:
        self.cuda.calls.append(f"wait for {self.name}")


class FakeStream(str):
    def __new__(cls, cuda: FakeCuda) -> FakeStream:
        made = super().__new__(cls, "side")
        made.cuda = cuda  # type: ignore[attr-defined]
        return made

    def wait_event(self, event: FakeEvent) -> None:
        self.cuda.calls.append(f"side waits for {event.name}")  # type: ignore[attr-defined]

    def wait_stream(self, other: str) -> None:
        self.cuda.calls.append(f"side waits for {other}")  # type: ignore[attr-defined]


class FakeCuda:
    """`torch.cuda`, as far as the copies use it; keeps what was called."""

    def __init__(self, available: bool = True, error: int = 0) -> None:
        self.available, self.error = available, error
        self.calls, self.recorded = list[str](), list[str]()
        self.registered, self.streams = set[int](), 0

    def is_available(self) -> bool:
        return self.available

    def Stream(self) -> FakeStream:
        self.streams += 1
        return FakeStream(self)

    def Event(self) -> FakeEvent:
        return FakeEvent(self)

    def current_stream(self) -> str:
        return "main"

    def current_device(self) -> int:
        return 3

    def set_device(self, device: int) -> None:
        self.calls.append(f"device {device}")

    @contextmanager
    def stream(self, stream: str) -> Any:
        self.calls.append(f"in {stream}")
        yield
        self.calls.append("out")

    def cudart(self) -> FakeCuda:
        return self

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert address not in self.registered and size > 0
        if not self.error:
            self.registered.add(address)
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        self.registered.remove(address)
        return 0


class OnDevice:
    """A weight on a CUDA device."""

    def __init__(self, cuda: FakeCuda, nbytes: int) -> None:
        self.cuda, self.nbytes = cuda, nbytes
        self.device = type("Device", (), {"type": "cuda"})()

    def record_stream(self, stream: str) -> None:
        self.cuda.calls.append(f"kept for {stream}")


class OnHost:
    """Staged memory."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def copy_(self, source: OnDevice, non_blocking: bool) -> None:
        assert non_blocking
        self.cuda.calls.append("copy")


def test_a_copy_waits_for_what_gathered_the_weight_and_keeps_it_until_it_has_ended() -> None:
    from seamless_verl.weights.host_copies import HostCopies

    cuda = FakeCuda()
    copies = HostCopies(cuda=cuda)
    target: Any = OnHost(cuda)
    weight: Any = OnDevice(cuda, 8)
    copies.copy(target, weight)
    begun = ["side waits for main", "in side", "copy", "kept for side", "copy 0 on side", "out"]
    assert cuda.calls == begun, "it does not wait for the copy"
    copies.finish()
    assert cuda.calls == [*begun, "wait for copy 0"]
    copies.finish()
    assert cuda.calls == [*begun, "wait for copy 0"]


def test_what_waits_on_the_device_is_bounded_and_a_weight_above_the_bound_comes_alone() -> None:
    from seamless_verl.weights.host_copies import HostCopies

    cuda = FakeCuda()
    copies = HostCopies(in_flight_bytes=10 * MIB, cuda=cuda)
    target: Any = OnHost(cuda)
    waited = []
    for size in (4, 4, 4, 20, 1):
        weight: Any = OnDevice(cuda, size * MIB)
        before = len(cuda.calls)
        copies.copy(target, weight)
        waited.append([call for call in cuda.calls[before:] if call.startswith("wait for")])
    assert waited == [[], [], ["wait for copy 0"], ["wait for copy 1", "wait for copy 2"], ["wait for copy 3"]]


def test_memory_is_pinned_once_and_given_up_before_other_memory_is(caplog: pytest.LogCaptureFixture) -> None:
    import torch

    from seamless_verl.weights.host_copies import HostCopies

    cuda, first, second = FakeCuda(), torch.zeros(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    copies = HostCopies(cuda=cuda)
    copies.pin(first)
    assert cuda.registered == {first.data_ptr()}
    copies.pin(second)
    assert cuda.registered == {second.data_ptr()}
    copies.unpin()
    copies.unpin()
    assert cuda.registered == set()
    checked = list[str]()

    def launch() -> None:
        checked.append("kernel")
        raise RuntimeError("CUDA error: out of memory")  # the one of the call before

    refused = HostCopies(cuda=FakeCuda(error=2), launch=launch)
    refused.pin(first)
    assert checked, "the next kernel of a computation would raise it"
    assert "64 bytes of staged weights could not be pinned (CUDA error 2)" in caplog.text
    caplog.clear()
    refused.unpin()


def test_staging_memory_pins_what_it_keeps_and_the_readers_pin_theirs() -> None:
    import torch

    from seamless_verl.weights.host_copies import HostCopies
    from seamless_verl.weights.staging import MappedMemory, StagingMemory

    writing, reading = FakeCuda(), FakeCuda()
    memory, mapped = StagingMemory("a", HostCopies(cuda=writing)), MappedMemory(HostCopies(cuda=reading))

    def stage(version: int, size: int) -> set[int]:
        memory.begin()
        memory.add("w", torch.full((size,), float(version)))
        staged = memory.end(version)
        assert dict(mapped.map(staged))["w"].tolist() == [float(version)] * size
        mapped.check(staged)
        return set(reading.registered)

    stage(1, 100)
    places = [stage(version, 100) for version in (2, 3)]
    assert places[0] == places[1] and len(places[0]) == len(writing.registered) == 1
    stage(4, 10_000)  # grows
    stage(5, 10_000)
    assert len(reading.registered) == len(writing.registered) == 1
    memory.close()
    assert writing.registered == set()


def test_a_host_without_cuda_copies_at_once_and_pins_nothing() -> None:
    import torch

    from seamless_verl.weights.host_copies import HostCopies

    cuda = FakeCuda(available=False)
    copies, target = HostCopies(cuda=cuda), torch.zeros(3, 2)
    copies.copy(target, torch.arange(6.0).view(2, 3).T)
    copies.pin(target)
    copies.finish()
    assert target.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]] and cuda.calls == [] and not cuda.registered


def copied(weight: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    """What a load plan's copy makes of a shard, on a device whose memory is not the host's."""
    import torch

    from seamless_verl.replica.load_plan import Copy

    class Elsewhere(torch.Tensor):
        """Says that it is on another device, and is not."""

        @property
        def device(self) -> Any:
            return torch.device("cpu", 0)

    target = torch.zeros(shard.shape).as_subclass(Elsewhere)
    Copy(target, "w", shard.storage_offset() - weight.storage_offset(), shard.size(), shard.stride()).run({"w": weight})
    return target.as_subclass(torch.Tensor)


def test_a_shard_that_is_not_contiguous_goes_to_the_device_in_one_piece() -> None:
    import torch

    weight = torch.arange(60.0)[6:54].view(6, 8)
    for shard in (weight[1:4], weight[:, 2:5], weight[2:, ::3], weight.T[1:3], weight[:0], weight[3, 3]):
        assert torch.equal(copied(weight, shard), shard)


def test_another_threads_work_begins_after_what_is_queued_by_now_and_on_a_stream_of_its_own() -> None:
    from seamless_verl.weights.host_copies import work_after_this

    cuda = FakeCuda()
    block = work_after_this(cuda)
    assert cuda.calls == ["copy 0 on main"], "an event behind the optimizer's step"
    cuda.calls.append("the trainer computes")
    with block():
        cuda.calls.append("export")
    assert cuda.calls[2:] == ["device 3", "side waits for copy 0", "in side", "export", "out"]
    with work_after_this(cuda)():
        assert cuda.streams == 1, "torch would keep memory for each of them"
    without = FakeCuda(available=False)
    with work_after_this(without)():
        assert without.calls == []
