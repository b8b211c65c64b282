"""Makes what the tool agent's recipe trains on: `model/`, `train.parquet` and `val.parquet` in one folder.

    python recipes/openai_tool_agent/data.py --out DIR [--steps 400] [--seed 0] [--train 2048] [--val 64]

A model that was made with the same seed and steps is kept.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

from transcripts import ask

from seamless_verl.errors import ConfigError, exits_on_config_error
from seamless_verl.tiny import beginner
from seamless_verl.tiny.files import writing_to
from seamless_verl.tiny.task import write_parquet

DATA_SOURCE = "calculator"


def rows(split: str, seed: int, count: int) -> list[dict[str, Any]]:
    """`count` rows in verl's format, the same for the same arguments; raises ConfigError for fewer than one."""
    if count < 1:
        raise ConfigError(split, count, "there must be at least one row", "Ask for one or more")
    draw = random.Random(f"{DATA_SOURCE}/{split}/{seed}")
    questions = [ask(draw) for _ in range(count)]
    return [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": question.text}],
            "ability": "tools",
            "reward_model": {"style": "rule", "ground_truth": question.answer},
            "extra_info": {"split": split, "index": index},
        }
        for index, question in enumerate(questions)
    ]


def make_beginner(folder: Path, seed: int, steps: int) -> None:
    """Make the warm-started model unless it exists; raises ConfigError for fewer than one step."""
    if steps < 1:
        raise ConfigError("steps", steps, "there must be at least one step", "Ask for one or more")

    def warm_start(folder: Path, seed: int, steps: int) -> None:
        from warm_start import warm_start  # torch and transformers take seconds to import

        warm_start(folder, seed, steps)

    code = [Path(__file__).with_name(name) for name in ("agent.py", "transcripts.py", "warm_start.py")]
    beginner.make_beginner(folder, seed, steps, code=code, warm_start=warm_start)


@exits_on_config_error
def main() -> int:
    """Exit code 0, or 2 with one line on standard error for a setting that cannot work."""
    parser = argparse.ArgumentParser(description="Make the tool agent's model and data.")
    parser.add_argument("--out", type=Path, required=True, help="folder for model/ and the parquet files")
    parser.add_argument("--steps", type=int, default=400, help="of the warm start")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the data")
    parser.add_argument("--train", type=int, default=2048, help="questions to train on")
    parser.add_argument("--val", type=int, default=64, help="questions to validate on")
    options = parser.parse_args()
    with writing_to(options.out):
        for split, count in (("train", options.train), ("val", options.val)):
            write_parquet(options.out / f"{split}.parquet", rows(split, options.seed, count))
        make_beginner(options.out / "model", options.seed, options.steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
