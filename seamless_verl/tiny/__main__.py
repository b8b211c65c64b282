"""`python -m seamless_verl.tiny --size nano --seed 0 --out DIR [--positions 8192] [--task arithmetic --train 2048]`.

Writes `DIR/model`, and with a task `DIR/train.parquet` and `DIR/val.parquet`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from seamless_verl.errors import ConfigError, exits_on_config_error
from seamless_verl.tiny.files import writing_to
from seamless_verl.tiny.models import MAX_POSITIONS, SIZES, make_model
from seamless_verl.tiny.task import make_arithmetic

TASKS = {"arithmetic": make_arithmetic}


@exits_on_config_error
def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 with one line on standard error for a setting that cannot work."""
    options = _parser().parse_args(arguments)
    check_rows(train=options.train, val=options.val)
    with writing_to(options.out):
        make_model(options.size, options.seed, options.out / "model", options.positions)
        if options.task:
            TASKS[options.task](options.out, options.seed, options.train, options.val)
    return 0


def check_rows(**counts: int) -> None:
    """ConfigError for a count below 1, before a model is made, which takes seconds."""
    for name, count in counts.items():
        if count < 1:
            raise ConfigError(f"--{name}", count, "there must be at least one row", f"Give --{name} 1 or more")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m seamless_verl.tiny", description="Make a tiny model.")
    parser.add_argument("--size", choices=SIZES, default="nano")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the data")
    parser.add_argument("--positions", type=int, default=MAX_POSITIONS, help="the model's longest sequence, in tokens")
    parser.add_argument("--out", type=Path, required=True, help="folder for model/ and the parquet files")
    parser.add_argument("--task", choices=TASKS, help="write data for this task as well")
    parser.add_argument("--train", type=int, default=2048, help="rows of train.parquet")
    parser.add_argument("--val", type=int, default=128, help="rows of val.parquet")
    return parser


if __name__ == "__main__":
    sys.exit(main())
