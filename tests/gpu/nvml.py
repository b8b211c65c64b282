"""The card as its driver sees it: memory in use, and its share of time with a kernel running, sampled by a thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import mean

PERIOD_S = 0.1


@dataclass
class Samples:
    """`used`: bytes; `busy`: NVML's utilisation, 0 to 1, of the driver's own period before each sample."""

    used: list[int] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        if not self.used:
            return {}
        return {"peak_gb": max(self.used) / 1e9, "busy_share": mean(self.busy), "samples": len(self.used)}


def memory_used() -> int:
    with sampling(wanted=False) as samples:
        return samples.used[0]


@contextmanager
def sampling(wanted: bool = True) -> Iterator[Samples]:
    """Samples of the first card, taken in the block; one at its beginning without `wanted`."""
    import pynvml

    pynvml.nvmlInit()
    device, samples, done = pynvml.nvmlDeviceGetHandleByIndex(0), Samples(), threading.Event()

    def sample() -> None:
        samples.used.append(int(pynvml.nvmlDeviceGetMemoryInfo(device).used))
        samples.busy.append(pynvml.nvmlDeviceGetUtilizationRates(device).gpu / 100)

    def work() -> None:
        while not done.wait(PERIOD_S):
            sample()

    sample()
    thread = threading.Thread(target=work, name="nvml")
    if wanted:
        thread.start()
    try:
        yield samples
    finally:
        done.set()
        if wanted:
            thread.join()
        pynvml.nvmlShutdown()
