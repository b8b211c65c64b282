"""Ray's settings that a run's own cluster is started with: Ray still reads them under these names."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from ray.actor import ActorMethod

from seamless_verl.main_ppo import TASK_RECORDS

pytestmark = pytest.mark.integration
GCS_SERVER = Path(ray.__file__).parent / "core/src/ray/gcs/gcs_server"


@pytest.mark.parametrize("variable", TASK_RECORDS)
def test_ray_reads_how_many_ended_tasks_it_remembers(variable: str) -> None:
    name = variable.removeprefix("RAY_")
    if not hasattr(ray._config, name):  # before Ray 2.60 only the server that reads it has it
        assert name.encode() in GCS_SERVER.read_bytes(), f"ray has no setting {variable}"
        return
    code = f"import ray; print(ray._config.{name}())"
    environ = {**os.environ, variable: "12345"}
    read = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=120)
    assert read.stdout.strip() == "12345", f"ray has no setting {variable} any more\n{read.stderr}"


def test_a_call_may_leave_no_record_in_ray() -> None:
    """Ray's options of a method are the parameters of what submits its calls."""
    assert "enable_task_events" in inspect.signature(ActorMethod._remote).parameters
    marked = ray.method(enable_task_events=False)(lambda: None)  # refuses options that it does not know
    assert vars(marked) == {"__ray_enable_task_events__": False}
