"""A process goes before others for as long as it says, where the system lets it, and is as it was after that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from seamless_verl.platform.priority import CAP_SYS_ADMIN, CAP_SYS_NICE, ENABLED, STATUS

pytestmark = pytest.mark.integration
SESSION = """
import os
from contextlib import suppress
from pathlib import Path

from seamless_verl.platform.priority import before_helpers

autogroup = Path("/proc/self/autogroup")
if os.environ["BEFORE"]:
    autogroup.write_text(os.environ["BEFORE"])
if os.environ["NOBODY"]:
    os.setuid(65534)

niceness = lambda: autogroup.read_text().split()[-1]
said = [niceness()]
with suppress(ZeroDivisionError), before_helpers():
    said.append(niceness())
    1 / 0
print(*said, niceness())
"""


def privileged() -> bool:
    effective = next(line.split()[1] for line in STATUS.read_text().splitlines() if line.startswith("CapEff"))
    return not (CAP_SYS_ADMIN | CAP_SYS_NICE) & ~int(effective, 16)


@pytest.mark.skipif(not ENABLED.exists(), reason="sessions are no autogroups on this kernel")
@pytest.mark.parametrize("before", ["", "3"])
@pytest.mark.parametrize("nobody", ["", "1"])
def test_a_session_goes_first_and_back_again(before: str, nobody: str) -> None:
    if (before or nobody) and not privileged():
        pytest.skip("only root can become nobody, and change an autogroup twice at once")
    env = os.environ | {"BEFORE": before, "NOBODY": nobody, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", SESSION]
    done = subprocess.run(command, env=env, capture_output=True, text=True, start_new_session=True, timeout=60)
    first, within, after = done.stdout.split() or [done.stderr] * 3
    usual = before or "0"
    assert (first, after) == (usual, usual)
    on = ENABLED.read_text().strip() == "1"
    assert within == ("-10" if on and privileged() and not nobody else usual)
