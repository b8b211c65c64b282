"""A run that has an address, where nobody listens, and does nothing: MAIN of a run.sh whose runner is tried."""

from __future__ import annotations

import os
import time
from pathlib import Path

FILE = Path(os.environ["DATA"], "checkpoints", "trajectories.sqlite.admin.json")

FILE.parent.mkdir(parents=True)
FILE.write_text('{"url": "http://127.0.0.1:9", "key": "key", "runner_key": "key"}')
time.sleep(240)
