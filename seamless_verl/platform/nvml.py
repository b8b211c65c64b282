"""How busy accelerators are by their driver's account (NVML), to compare with the device-second ledger.

NVML's utilization is the share of its last sample, 1/6 s to 1 s, in which a kernel ran. The ledger's `rollout` counts
time with a running request. They differ where an engine has requests and computes nothing.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from typing import Any

logger = logging.getLogger(__name__)
PERIOD_S = 1.0
VARIABLE = "CUDA_VISIBLE_DEVICES"


class NvmlUtilization:
    """The devices of a process, as CUDA_VISIBLE_DEVICES has them: indices or UUIDs. `nvml` is the module pynvml."""

    def __init__(self, devices: Sequence[str], nvml: Any) -> None:
        self.nvml = nvml
        nvml.nvmlInit()
        self.handles = handles_of(devices, nvml)

    def read(self) -> list[float]:
        return [self.nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100 for handle in self.handles]


def visible_gpus(nvml: Any, devices: str | None) -> tuple[list[str], str]:
    """The models of the GPUs that `devices`, CUDA_VISIBLE_DEVICES, lets a process see (None: all), and their driver.

    NVMLError where the driver does not answer.
    """
    nvml.nvmlInit()
    every = range(nvml.nvmlDeviceGetCount()) if devices is None else devices.split(",")
    handles = handles_of([str(name).strip() for name in every if str(name).strip()], nvml)
    return [text_of(nvml.nvmlDeviceGetName(handle)) for handle in handles], text_of(nvml.nvmlSystemGetDriverVersion())


def handles_of(devices: Sequence[str], nvml: Any) -> list[Any]:
    """NVML's handles of devices by index or UUID."""
    return [
        nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else nvml.nvmlDeviceGetHandleByUUID(name)
        for name in devices
    ]


def text_of(value: str | bytes) -> str:
    """Of what older versions of pynvml give as bytes."""
    return value.decode() if isinstance(value, bytes) else value


class UtilizationSampler:
    """Owns a thread that reads every `period_s` seconds until `close`."""

    def __init__(self, utilization: NvmlUtilization, period_s: float = PERIOD_S) -> None:
        self.utilization, self.period_s = utilization, period_s
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._sums: list[float] = []
        self._samples = 0
        self._thread = threading.Thread(target=self._run, name="nvml", daemon=True)
        self._thread.start()

    def take(self) -> tuple[float, ...]:
        """Each device's mean share since the last call; empty where nothing was read since."""
        with self._lock:
            means = tuple(total / self._samples for total in self._sums)
            self._sums, self._samples = [], 0
        return means

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def sample(self) -> None:
        shares = self.utilization.read()
        with self._lock:
            self._sums = [total + share for total, share in zip(self._sums or [0.0] * len(shares), shares, strict=True)]
            self._samples += 1

    def _run(self) -> None:
        while not self._ended.wait(self.period_s):
            try:
                self.sample()
            except Exception:  # whatever the driver says, the run goes on without this metric
                logger.exception("NVML does not answer any more; devices/nvml_busy ends here")
                return


def utilization_sampler(nvml: Any, devices: str | None = None) -> UtilizationSampler | None:
    """A sampler of this process's devices; None, with a warning, where NVML cannot be used."""
    names = (os.environ.get(VARIABLE, "") if devices is None else devices).split(",")
    try:
        return UtilizationSampler(NvmlUtilization([name.strip() for name in names if name.strip()], nvml))
    except nvml.NVMLError as error:
        logger.warning("devices/nvml_busy is not measured: %s", error)
        return None
