"""The last screen of a run whose engine does not start has what vLLM wrote of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.job import Job
from support.paths import child_environment

pytestmark = [pytest.mark.integration]
LAST_SCREEN = 24
PROGRAM = """
import subprocess, sys
from seamless_verl.runtime.own_log import OwnLog
print("OSError: of before", file=sys.stderr, flush=True)
log = OwnLog()
subprocess.run([sys.executable, "-c", "int('x')"])
print("RuntimeError: the child has ended", file=sys.stderr, flush=True)
found = log.last_error(besides=["has ended"]), log.last_error(besides=["Error"])
open(sys.argv[1], "w").write(repr(found))
"""


def test_the_last_error_of_a_child_is_found_in_the_file_behind_the_stream(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "found")]
    with (tmp_path / "log").open("w") as log:
        subprocess.run(command, env=child_environment(), stdout=log, stderr=log, check=True)
    found = (tmp_path / "found").read_text()
    assert found == repr(("ValueError: invalid literal for int() with base 10: 'x'", None))


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"actor_rollout_ref__rollout__dtype": "float17"}, "argument --dtype: invalid choice: 'float17'"),
        pytest.param(
            {"+actor_rollout_ref__rollout__engine_kwargs__vllm__no_such_option": 1},
            "unrecognized arguments: --no-such-option",
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"+actor_rollout_ref__rollout__engine_kwargs__vllm__kv_cache_memory_bytes": 1000},
            "ValueError: No available memory for the cache blocks",
            marks=pytest.mark.long,
        ),
    ],
    ids=["no_dtype", "no_option", "no_memory"],
)
def test_what_vllm_wrote_is_on_the_last_screen(
    nano: Path, tmp_path: Path, setting: dict[str, object], said: str
) -> None:
    job = Job(tmp_path, nano, setting).start()
    assert job.process is not None and job.process.wait(240) == 1
    last = "\n".join(job.log().splitlines()[-LAST_SCREEN:])
    for text in ("The run ended early: vLLM did not start: ", said, "actor_rollout_ref.rollout"):
        assert text in last, f"{text!r} is not in the last lines:\n{last}"
