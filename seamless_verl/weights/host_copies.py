"""Copies weights from a trainer's device to the host's memory; on CUDA on a stream of its own.

The next weights are gathered on the device meanwhile. A copy of pageable memory would hold them up, and runs at a
fraction of the bus's speed (CUDA C++ Best Practices Guide, "Data Transfer Between Host and Device").

Invariants: at most `in_flight_bytes` of weights, or one weight, wait on the device; after `finish` every copy has
ended.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from typing import Any

import torch

logger = logging.getLogger(__name__)
IN_FLIGHT_BYTES = 512 << 20
PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context of the process


def work_after_this(cuda: Any = torch.cuda) -> Callable[[], AbstractContextManager[None]]:
    """For another thread: a block whose work on this thread's CUDA device begins after what is queued there by now.

    The block has a stream of its own, the same at each call, since torch keeps freed memory for the stream that used
    it: on the default stream it would wait for all that this thread queues meanwhile. Without CUDA nothing is done.
    """
    if not cuda.is_available():
        return nullcontext
    device, queued = cuda.current_device(), cuda.Event()
    queued.record(cuda.current_stream())

    @contextmanager
    def block() -> Iterator[None]:
        cuda.set_device(device)  # each thread has its own
        stream = own_stream(cuda, device)
        stream.wait_event(queued)
        with cuda.stream(stream):
            yield

    return block


@cache
def own_stream(cuda: Any, device: int) -> Any:
    """The process's stream beside the default one, of this device, which is the current one."""
    del device
    return cuda.Stream()


def launch_kernel() -> None:
    """Has torch launch one, and check for the errors of calls before it."""
    torch.ones(1, device="cuda")


class HostCopies:
    """Owns the stream of the copies, and what is pinned. `cuda` is `torch.cuda`; `launch` launches a kernel there."""

    def __init__(
        self,
        *,
        in_flight_bytes: int = IN_FLIGHT_BYTES,
        cuda: Any = torch.cuda,
        launch: Callable[[], None] = launch_kernel,
    ) -> None:
        self.in_flight_bytes, self.cuda, self._launch = in_flight_bytes, cuda, launch
        self._stream: Any = None
        self._in_flight = deque[tuple[Any, int]]()  # the event after each copy, and the copy's bytes
        self._pinned: torch.Tensor | None = None

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies `source` to `target`, of its shape and dtype on the host; on CUDA it may end at `finish`."""
        if source.device.type != "cuda":
            target.copy_(source)
            return
        self._stream = self._stream or self.cuda.Stream()
        self._stream.wait_stream(self.cuda.current_stream())  # which gathered the weight
        with self.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            source.record_stream(self._stream)  # its memory is not used again before the copy has ended
            copied = self.cuda.Event()
            copied.record(self._stream)
        self._in_flight.append((copied, source.nbytes))
        while len(self._in_flight) > 1 and sum(size for _, size in self._in_flight) > self.in_flight_bytes:
            self._in_flight.popleft()[0].synchronize()

    def finish(self) -> None:
        """Returns when all copies have ended."""
        while self._in_flight:
            self._in_flight.popleft()[0].synchronize()

    def pin(self, memory: torch.Tensor) -> None:
        """Pins `memory`, uint8 [bytes], in the place of what was pinned before; without CUDA nothing is done."""
        self.unpin()
        if not self.cuda.is_available():
            return
        error = int(self.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, PORTABLE))
        if error:
            # As often as not a limit of the container (`ulimit -l`): the copies are slower, and right.
            logger.warning("%d bytes of staged weights could not be pinned (CUDA error %d)", memory.nbytes, error)
            with suppress(RuntimeError):  # CUDA keeps the error for the next check, which takes it: no computation's
                self._launch()
        else:
            self._pinned = memory

    def unpin(self) -> None:
        """Before the memory is unmapped."""
        if self._pinned is not None:
            self.cuda.cudart().cudaHostUnregister(self._pinned.data_ptr())
        self._pinned = None
