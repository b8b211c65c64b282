"""Makes what the arithmetic recipe trains on: `model/`, `train.parquet` and `val.parquet` in one folder.

    python recipes/arithmetic_grpo/data.py --out DIR [--size nano] [--seed 0] [--train 4096] [--val 128]

A model that was made with the same size and seed is kept.

For a task of your own, write rows with the same columns: `data_source`, `prompt` (chat messages),
`ability`, `reward_model` (`style`, `ground_truth`) and `extra_info` (`index`).
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from seamless_verl.errors import ConfigError, exits_on_config_error
from seamless_verl.tiny import SIZES, keep_or_make_model, make_arithmetic
from seamless_verl.tiny.files import writing_to


@exits_on_config_error
def main() -> int:
    """Exit code 0, or 2 with one line on standard error for a setting that cannot work."""
    parser = argparse.ArgumentParser(description="Make the arithmetic recipe's model and data.")
    parser.add_argument("--out", type=Path, required=True, help="folder for model/ and the parquet files")
    parser.add_argument("--size", choices=SIZES, default="nano")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the data")
    parser.add_argument("--train", type=int, default=4096, help="questions to train on")
    parser.add_argument("--val", type=int, default=128, help="questions to validate on")
    options = parser.parse_args()
    with writing_to(options.out):
        check(options)
        keep_or_make_model(options.size, options.seed, options.out / "model")
        make_arithmetic(options.out, options.seed, options.train, options.val)
    return 0


def check(options: argparse.Namespace) -> None:
    """Raise ConfigError for a setting that cannot work, before anything is imported or written for it."""
    for name in ("train", "val"):
        count = getattr(options, name)
        if count < 1:
            raise ConfigError(f"--{name}", count, "there must be at least one question", f"Give --{name} 1 or more")
    out = options.out.absolute()
    existing = next(path for path in (out, *out.parents) if path.exists())
    if not existing.is_dir():
        raise ConfigError("--out", str(options.out), f"{existing} is a file", "Name a folder; it is made if missing")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError("--out", str(options.out), f"{existing} cannot be written", "Name a folder of yours")


if __name__ == "__main__":
    sys.exit(main())
