"""What the driver says of the devices, with a fake NVML."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from seamless_verl.platform.nvml import NvmlUtilization, UtilizationSampler, utilization_sampler, visible_gpus


class FakeError(Exception):
    pass


class FakeNvml:
    """Devices by index and by UUID, each with a share in percent; an `error` of the driver from the start."""

    NVMLError = FakeError

    def __init__(self, *percents: int, error: str = "") -> None:
        self.percents, self.error = list(percents), error
        self.read = threading.Event()

    def nvmlInit(self) -> None:
        if self.error:
            raise FakeError(self.error)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return int(uuid.removeprefix("GPU-"))

    def nvmlDeviceGetCount(self) -> int:
        return len(self.percents)

    def nvmlDeviceGetName(self, handle: int) -> str | bytes:
        return f"card {handle}" if handle else b"card 0"  # as older versions of pynvml give it

    def nvmlSystemGetDriverVersion(self) -> str:
        return "550.1"

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        if handle == len(self.percents) - 1:
            self.read.set()
        return SimpleNamespace(gpu=self.percents[handle])


def test_devices_are_read_as_the_variable_names_them() -> None:
    assert NvmlUtilization(["1", "GPU-0"], FakeNvml(20, 80)).read() == [0.8, 0.2]


def test_models_and_driver_are_those_of_the_devices_that_are_seen() -> None:
    nvml = FakeNvml(20, 80)
    assert visible_gpus(nvml, None) == (["card 0", "card 1"], "550.1")
    assert visible_gpus(nvml, "1, GPU-0") == (["card 1", "card 0"], "550.1")
    assert visible_gpus(nvml, "") == ([], "550.1")
    with pytest.raises(FakeError):
        visible_gpus(FakeNvml(error="no driver"), None)


def test_a_take_is_the_mean_since_the_last_one() -> None:
    nvml = FakeNvml(0, 100)
    sampler = UtilizationSampler(NvmlUtilization(["0", "1"], nvml), period_s=3600)
    assert sampler.take() == ()
    sampler.sample()
    nvml.percents = [50, 100]
    sampler.sample()
    assert sampler.take() == (0.25, 1.0) and sampler.take() == ()
    sampler.close()


def test_a_sampler_has_the_devices_of_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1, GPU-0")
    sampler = utilization_sampler(FakeNvml(20, 80))
    assert sampler is not None
    sampler.close()
    sampler.sample()
    assert sampler.take() == (0.8, 0.2)


def test_the_thread_reads_until_it_is_closed() -> None:
    nvml = FakeNvml(30)
    sampler = UtilizationSampler(NvmlUtilization(["0"], nvml), period_s=0.001)
    assert nvml.read.wait(10)
    sampler.close()
    assert sampler.take() == pytest.approx((0.3,)) and not sampler._thread.is_alive()


def test_a_driver_that_fails_costs_the_metric_alone(caplog: pytest.LogCaptureFixture) -> None:
    assert utilization_sampler(FakeNvml(error="Driver Not Loaded"), "0") is None
    assert "devices/nvml_busy is not measured: Driver Not Loaded" in caplog.text
    sampler = UtilizationSampler(NvmlUtilization(["5"], FakeNvml(1)), period_s=0.001)  # no such device
    sampler._thread.join(10)
    assert not sampler._thread.is_alive() and "NVML does not answer" in caplog.text
    sampler.close()
