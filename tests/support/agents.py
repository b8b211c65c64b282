"""Small factories for the tests of agents."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from seamless_verl.agents.callable import in_thread
from seamless_verl.agents.command import AgentCommand, run_command
from seamless_verl.agents.endpoint import Endpoint
from seamless_verl.agents.limits import CommandLimits
from seamless_verl.agents.outcome import AgentOutcome

ENDPOINT = Endpoint("http://127.0.0.1:8000", "sk-secret", "group/7")


def limits(**changed: Any) -> CommandLimits:
    return CommandLimits(**({"wall_s": 20.0, "grace_s": 2.0} | changed))


def python(code: str) -> list[str]:
    """Arguments that run the code; its braces are no fields."""
    return [sys.executable, "-I", "-S", "-c", code.replace("{", "{{").replace("}", "}}")]


def ran(command: str | list[str], task: Mapping[str, Any] | None = None, **options: Any) -> AgentOutcome:
    options.setdefault("limits", limits())
    return asyncio.run(run_command(AgentCommand(command, **options), task or {}, ENDPOINT))


def running(pid: int) -> bool:
    """Whether the process runs; one that only has not been waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def private_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the test's own under which working folders are made; also for the agents' pids."""
    folder = tmp_path / "scratches"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def fifo(path: Path) -> Path:
    """A pipe with a name: opening it waits for the other side, so that tests need not poll."""
    os.mkfifo(path)
    return path


async def line_of(path: Path) -> str:
    """The first line someone writes to the fifo; a TimeoutError if nobody does."""

    def read() -> str:
        with path.open() as file:
            return file.readline().strip()

    return await asyncio.wait_for(in_thread(read, daemon=True), 60)
