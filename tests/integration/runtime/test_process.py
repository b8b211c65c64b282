"""What the package logs in a process of Ray's is shown, once, though the root logger shows errors alone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = """
from vllm.entrypoints.openai import api_server
from seamless_verl.runtime.process import show_log
import logging
assert logging.getLogger().level == logging.ERROR, "show_log is not needed any more"
show_log(%r)
show_log(%r)
log = logging.getLogger("seamless_verl.trainer.prompt_lengths")
log.debug("not this")
log.info("this")
log.warning("and this")
"""


@pytest.mark.parametrize(
    ("given", "level", "lines"),
    [
        ({}, "INFO", ["this", "and this"]),
        ({}, "WARNING", ["and this"]),
        ({"VERL_LOGGING_LEVEL": "ERROR"}, "INFO", []),
    ],
)
def test_what_is_logged_is_shown_once(given: dict[str, str], level: str, lines: list[str]) -> None:
    levels = ("VERL_LOGGING_LEVEL", "LOG_LEVEL", "SAGEMAKER_CONTAINER_LOG_LEVEL")
    env = {name: value for name, value in os.environ.items() if name not in levels} | given
    code = CODE % (level, level)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ours = [line.rpartition(":")[2] for line in done.stderr.splitlines() if line.endswith("this")]
    assert ours == lines
