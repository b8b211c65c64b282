"""Checks one arm's settings as its run would, and writes its composed config, in the place of the run.

`python -m seamless_verl.tools.compare.probe KEY=VALUE ...` takes what main_ppo takes. It writes JSON to the file that
`SEAMLESS_PROBE` names: {"config": the resolved config, "cores": devices of the CPU platform here}. It starts nothing,
and ends with code 2 and the reason when the run would be refused.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

from omegaconf import DictConfig

from seamless_verl.config import SeamlessConfig
from seamless_verl.config.settings import resolved_tree
from seamless_verl.errors import exits_on_config_error
from seamless_verl.main_ppo import check, compose_and_run, run_folder
from seamless_verl.tools.compare.job import RESULT

INTERRUPTED = 130


def write_config(config: DictConfig) -> None:
    """ConfigError when the run would be refused."""
    check(config)
    devices = SeamlessConfig.parse(config.get("seamless")).cpu.device_count
    found = {"config": resolved_tree(config), "cores": devices if config.trainer.device == "cpu" else None}
    Path(os.environ[RESULT]).write_text(json.dumps(found, default=str))
    if (folder := run_folder()) is not None:
        shutil.rmtree(folder)  # hydra's, of a run that does not begin


@exits_on_config_error
def main() -> int:
    """Exit code 0, or 2 with a message on standard error."""
    compose_and_run(write_config)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda number, frame: sys.exit(INTERRUPTED))
    sys.exit(main())
