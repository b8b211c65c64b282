"""The trace of a process that is killed while it writes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.ledger import stretches

from seamless_verl.resources.ledger.activity import DeviceUse
from seamless_verl.tools.view.timeline import COLUMN_OF, read_timeline

pytestmark = pytest.mark.integration
WRITER = """
import sys, time
from pathlib import Path
from seamless_verl.resources.ledger.activity import ActivityReport, DeviceUse, UseSpan
from seamless_verl.resources.ledger.ledger import Ledger
from seamless_verl.resources.ledger.trace import Trace
trace = Trace(Path(sys.argv[1]), ["d0", "d1"], 0.0)
ledger = Ledger(["d0", "d1"], 0.0, trace=trace)
for step in range(10**9):
    spans = [UseSpan(f"d{n % 2}", DeviceUse.ROLLOUT, step + n / 50, step + n / 50 + 0.01) for n in range(50)]
    ledger.add(ActivityReport("s", step + 1, tuple(spans)))
    ledger.close(step + 1, f"step {step}")
    if step == 50:
        print("going", flush=True)
"""


def test_after_a_kill_all_but_what_was_being_written_is_there(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == b"going\n"
        os.kill(writer.pid, signal.SIGKILL)
    steps = stretches(path, 3)
    assert [name for _, name, _, _ in steps] == [f"step {n}" for n in range(len(steps))] and len(steps) > 50
    timeline = read_timeline(path, columns=10)
    assert timeline.until == len(steps)
    assert timeline.grid[:, :, COLUMN_OF[DeviceUse.ROLLOUT]].sum() == pytest.approx(0.5 * len(steps))
