"""Makes what the recipe trains on: `model/`, `train.parquet` and `val.parquet` in one folder.

    python recipes/hard_prompts/data.py --out DIR [--steps 300] [--seed 0] [--train 3072] [--val 192]

A model that was made with the same seed and steps is kept.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from sums import questions

from seamless_verl.errors import ConfigError, exits_on_config_error
from seamless_verl.tiny import beginner
from seamless_verl.tiny.files import writing_to
from seamless_verl.tiny.task import DATA_SOURCE, write_parquet


def rows(split: str, seed: int, count: int) -> list[dict[str, Any]]:
    """`count` rows in verl's format, the same for the same arguments; a longer list begins with the shorter."""
    return [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": question.text}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": question.answer},
            "extra_info": {"split": split, "index": index, "difficulty": question.difficulty},
        }
        for index, question in enumerate(questions(split, seed, count))
    ]


def make_beginner(folder: Path, seed: int, steps: int) -> None:
    """Make the warm-started model unless it exists."""

    def warm_start(folder: Path, seed: int, steps: int) -> None:
        from warm_start import warm_start  # torch and transformers take seconds to import

        warm_start(folder, seed, steps)

    code = [Path(__file__).with_name(name) for name in ("sums.py", "warm_start.py")]
    beginner.make_beginner(folder, seed, steps, code=code, warm_start=warm_start)


@exits_on_config_error
def main() -> int:
    """Exit code 0, or 2 with one line on standard error for a setting that cannot work."""
    parser = argparse.ArgumentParser(description="Make the model and the data of sums of three difficulties.")
    parser.add_argument("--out", type=Path, required=True, help="folder for model/ and the parquet files")
    parser.add_argument("--steps", type=int, default=300, help="of the warm start")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the data")
    parser.add_argument("--train", type=int, default=3072, help="questions to train on")
    parser.add_argument("--val", type=int, default=192, help="questions to validate on")
    options = parser.parse_args()
    for name in ("steps", "train", "val"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name}", getattr(options, name), "there must be at least one", "Give 1 or more")
    with writing_to(options.out):
        for split in ("train", "val"):
            write_parquet(options.out / f"{split}.parquet", rows(split, options.seed, getattr(options, split)))
        make_beginner(options.out / "model", options.seed, options.steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
