"""What is known of the machine of a run, and when two runs are of two machines."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from seamless_verl.tools.compare.machine import IDENTITY, differ, gpus, machine, machine_words

CHIP = {"processor": "Chip", "cores": 2, "memory_gb": 8.0, "load_average": [0.5]}
CARDS = {"gpus": ["H100", "H100"], "driver": "550.1"}


@pytest.mark.parametrize(
    ("other", "known"),
    [
        ({"load_average": [9.0], "memory_gb": 7.9}, False),
        ({"processor": "Other"}, True),
        ({"cores": 1}, True),
        ({"gpus": ["A100", "A100"]}, True),
        ({"gpus": []}, True),
        ({"driver": "560.2"}, True),
    ],
)
def test_machines_differ_in_processor_cores_gpus_or_driver(other: dict[str, object], known: bool) -> None:
    assert differ(CHIP | CARDS, CHIP | CARDS | other) == known
    assert not differ(CHIP, CHIP | CARDS) and not differ({}, CHIP), "what was not written down is not known"


def test_a_machine_is_named_with_its_gpus() -> None:
    assert machine_words(CHIP | CARDS) == "Chip, 2 cores, 8.0 GB, 2 x H100, driver 550.1"
    assert machine_words(CHIP) == machine_words(CHIP | {"gpus": [], "driver": "550.1"}) == "Chip, 2 cores, 8.0 GB"


def test_this_machine_has_what_is_compared() -> None:
    found = machine()
    assert {"processor", "cores", "memory_gb", "load_average"} <= set(found)
    assert set(IDENTITY) & set(found) and not differ(found, machine())


class FakeError(Exception):
    pass


def fake_nvml(error: str = "") -> SimpleNamespace:
    def init() -> None:
        if error:
            raise FakeError(error)

    return SimpleNamespace(
        NVMLError=FakeError,
        nvmlInit=init,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda handle: f"Card {handle}".encode(),
        nvmlSystemGetDriverVersion=lambda: "550.1",
    )


def test_gpus_are_those_that_the_run_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())
    assert gpus() == {"gpus": ["Card 0", "Card 1"], "driver": "550.1"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert gpus()["gpus"] == ["Card 1"]
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml("no driver"))
    assert gpus() == {}
