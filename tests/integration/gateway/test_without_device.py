"""A gateway on a node without a device, as the head of a cluster is, with vLLM in its build for accelerators."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration
SCRIPT = """
import sys
import vllm.platforms
from vllm.platforms.interface import UnspecifiedPlatform
vllm.platforms._current_platform = UnspecifiedPlatform()  # what vLLM takes where it finds none
from seamless_verl.gateway.server import rendering_config, serve_arguments
print(rendering_config(serve_arguments(sys.argv[1])).device_config.device_type)
"""


def test_options_and_the_rendering_need_no_device(nano: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(nano / "model")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout.split()[-1] == "cpu"
