"""seamless-verl doctor on this machine, as a process of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.integration
COMMAND = [sys.executable, "-m", "seamless_verl.cli", "doctor", "--json"]
CODE = """
import sys
from seamless_verl.cli.main import main
code = main(["doctor", "--json", *sys.argv[1:]])
heavy = [name for name in ("torch", "ray", "verl", "vllm", "megatron") if name in sys.modules]
sys.stderr.write(",".join(heavy))
sys.exit(code)
"""


def findings(done: subprocess.CompletedProcess[str]) -> dict[str, list[dict[str, Any]]]:
    by_subject: dict[str, list[dict[str, Any]]] = {}
    for finding in json.loads(done.stdout)["findings"]:
        by_subject.setdefault(finding["subject"], []).append(finding)
    return by_subject


def test_this_machine_runs_the_tests_and_so_has_a_stack_in_order(tmp_path: Path) -> None:
    """The environment of the tests is a verified one; and nothing heavy is imported to say so."""
    argv = [sys.executable, "-c", CODE, "--folder", str(tmp_path / "not" / "yet")]
    env = {**os.environ, "VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, capture_output=True, text=True, env=env)
    assert done.stderr == ""
    found = findings(done)
    stack = ("python", "package", "versions", "stack", "platform", "devices")
    assert {finding["level"] for subject in stack for finding in found[subject]} == {"ok"}, done.stdout
    assert {"memory", "shared memory", "open files", "TMPDIR", "disk", "Ray"} <= set(found)
    assert done.returncode == int(json.loads(done.stdout)["errors"] > 0)


def test_what_is_wrong_is_found_and_named(tmp_path: Path) -> None:
    """A port in use, a cluster that nobody answers for, a folder that is not there, and a platform that is none."""
    with socket.create_server(("", 0)) as taken:
        port, absent = taken.getsockname()[1], str(tmp_path / "absent")
        env = {**os.environ, "VERL_PLATFORM": "cuda", "RAY_ADDRESS": "127.0.0.1:1", "TMPDIR": absent}
        done = subprocess.run([*COMMAND, "--port", str(port)], capture_output=True, text=True, env=env)
    assert done.returncode == 1 and done.stderr == ""
    found = findings(done)
    assert any(f"{port} cannot be listened to" in one["text"] for one in found["ports"])
    assert any("nobody listens there" in one["text"] for one in found["Ray"])
    assert any("absent' cannot be used" in one["text"] for one in found["TMPDIR"])
    assert any("VERL_PLATFORM='cuda'" in one["text"] for one in found["platform"])
    assert all(one["way_out"] for ones in found.values() for one in ones if one["level"] != "ok")


def test_its_output_is_read_by_people_too() -> None:
    done = subprocess.run(COMMAND[:-1], capture_output=True, text=True)
    assert done.returncode in (0, 1) and done.stderr == ""
    assert done.stdout.splitlines()[-1].partition(" ")[2].startswith("error")
