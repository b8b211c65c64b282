"""A main job under our supervisor: `python -m seamless_verl.tools.bench.training.supervised MODULE [ARGUMENT ...]`.

verl's main job has no supervisor of its own. With ours both run under the same conditions: Ray's files in a scratch
folder, and one idle parent that ends every process that outlives the job.
"""

from __future__ import annotations

import sys
from pathlib import Path

from seamless_verl.runtime.supervisor import supervise


def do_nothing(_: Path) -> None:
    """A bench writes no checkpoints that would have to be cleaned up."""


if __name__ == "__main__":
    command = [sys.executable, "-W", "ignore", "-m", *sys.argv[1:]]
    sys.exit(
        supervise(
            command,
            run_file_variable="SEAMLESS_BENCH_RUN",
            on_exit=do_nothing,
            ignore_local_cluster=True,
        )
    )
