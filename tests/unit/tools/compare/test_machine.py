"""What is known of the machine and the surroundings of a run, and when two runs are of two machines."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from seamless_verl.tools.compare.machine import (
    IDENTITY,
    condition_lines,
    differ,
    gpus,
    kept_environment,
    machine,
    machine_words,
    span,
)

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


def run(began: float, *, load: float = 0.5, verl: str = "0.9.1") -> dict[str, Any]:
    machine = {"processor": "Chip", "cores": 2, "memory_gb": 8.0, "load_average": [load]}
    git = {"commit": "abc", "changed": ["M x"]}
    return {"began": began, "ended": began + 90, "versions": {"verl": verl}, "git": git, "machine": machine}


def test_what_steers_a_run_is_kept_and_no_secret() -> None:
    steering = {"SEAMLESS_LOG": "1", "VERL_PLATFORM": "cpu", "NCCL_DEBUG": "INFO"}
    secrets = ("SEAMLESS_RUNNER_KEY", "SEAMLESS_SESSION_KEY", "VERL_TOKEN", "SEAMLESS_secret", "VERL_DB_PASSWORD")
    assert kept_environment({**steering, **dict.fromkeys(secrets, "s"), "HOME": "/root"}) == steering


def test_a_report_says_once_what_its_runs_have_alike_and_when_they_were_made() -> None:
    runs = [run(3600.0), run(0.0, load=1.5)]
    assert list(condition_lines(runs)) == [
        "Machine: Chip, 2 cores, 8.0 GB; load average at the end 1.5.",
        "Versions: verl 0.9.1.",
        "Commit: abc, 1 files changed.",
        "The runs were made from 1970-01-01 00:00 to 1970-01-01 01:01 UTC, and took 3.0 minutes together.",
    ]
    assert span(runs) == (0.0, 3690.0)
    one = run(0.0)
    one["machine"] |= {"gpus": ["NVIDIA H100"], "driver": "550.1"}
    line = next(condition_lines([one]))
    assert line.startswith("Machine: Chip, 2 cores, 8.0 GB, 1 x NVIDIA H100, driver 550.1; load average at the end")
    versions = list(condition_lines([*runs, run(1.0, verl="0.9.2")]))[1:3]
    assert versions == ["Versions: verl 0.9.1.", "Versions: verl 0.9.2."]
