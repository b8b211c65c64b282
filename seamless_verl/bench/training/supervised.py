"""`python -m seamless_verl.bench.training.supervised MODULE [ARGUMENT ...]` runs a main job that leaves nothing behind.

verl's main job has no supervisor of its own. With the one that ours has, both run under the same conditions:
Ray's files in a scratch folder, and one idle parent that ends whatever outlives the job.
"""

from __future__ import annotations

import sys
from pathlib import Path

from seamless_verl.runtime.supervisor import supervise


def nothing_to_tidy(_: Path) -> None:
    """No checkpoints are written in a bench."""


if __name__ == "__main__":
    command = [sys.executable, "-W", "ignore", "-m", *sys.argv[1:]]
    sys.exit(supervise(command, marker="SEAMLESS_BENCH_RUN", afterwards=nothing_to_tidy, alone=True))
