"""Which variables a manifest has, and what a report says of where and when its runs were made."""

from __future__ import annotations

from typing import Any

from seamless_verl.tools.compare.machine import condition_lines, kept_environment, span


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
