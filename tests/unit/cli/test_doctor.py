"""The doctor's output, its JSON, and its exit codes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from support.cli import Capture
from support.doctor import HEALTHY, facts

from seamless_verl.cli.main import main
from seamless_verl.tools.doctor import gather
from seamless_verl.tools.doctor.facts import Facts

WARNED = facts({"environ": {"OMP_NUM_THREADS": "8"}})
WAY_OUT = "Give a port to be tried"
FAILED = replace(WARNED, shared_memory=None)


def run(monkeypatch: pytest.MonkeyPatch, found: Facts, *arguments: str) -> int:
    monkeypatch.setattr(gather, "gather", lambda folder, ports: found)
    return main(["doctor", *arguments])


@pytest.mark.parametrize(
    ("found", "code", "last"),
    [
        (HEALTHY, 0, "0 errors, 0 warnings"),
        (WARNED, 0, "0 errors, 1 warning"),
        (FAILED, 1, "1 error, 1 warning"),
    ],
)
def test_only_an_error_is_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, found: Facts, code: int, last: str
) -> None:
    assert run(monkeypatch, found) == code
    printed, errors = capsys.readouterr()
    assert printed.splitlines()[-1] == last and errors == ""


def test_each_finding_has_its_way_out_below(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    run(monkeypatch, FAILED)
    lines = capsys.readouterr().out.splitlines()
    place = lines.index("error    shared memory: there is no /dev/shm")
    assert lines[place + 1] == "         -> Mount it: mount -t tmpfs shm /dev/shm"
    assert "ok       python: 3.11" in lines


def test_json_has_every_finding(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    assert run(monkeypatch, FAILED, "--json") == 1
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (found["format"], found["errors"], found["warnings"]) == (1, 1, 1)
    (wrong,) = [one for one in found["findings"] if one["level"] == "error"]
    way_out = "Mount it: mount -t tmpfs shm /dev/shm"
    assert wrong == {"subject": "shared memory", "level": "error", "text": "there is no /dev/shm", "way_out": way_out}
    assert all(one["way_out"] is None for one in found["findings"] if one["level"] == "ok")


@pytest.mark.parametrize("port", ["0", "65536", "-1"])
def test_a_port_that_there_is_not(capsys: Capture, port: str) -> None:
    assert main(["doctor", f"--port={port}"]) == 2
    assert capsys.readouterr() == ("", f"seamless-verl: --port={port}: is not between 1 and 65535. {WAY_OUT}\n")
