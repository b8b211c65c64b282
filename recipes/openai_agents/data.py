"""Makes what the recipe trains on: `model/`, `train.parquet` and `val.parquet` in one folder.

    python recipes/openai_agents/data.py --out DIR [--seed 0] [--train 64] [--val 8]

Each row names, as `agent_name`, the agent of agents.yaml that answers it: the four take turns.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

from seamless_verl.errors import ConfigError, exits_on_config_error
from seamless_verl.tiny import keep_or_make_model
from seamless_verl.tiny.files import writing_to
from seamless_verl.tiny.task import write_parquet

DATA_SOURCE = "sums"
AGENTS = ("responses", "responses_whole", "chat", "chat_whole")


def rows(split: str, seed: int, count: int) -> list[dict[str, Any]]:
    """`count` rows in verl's format, the same for the same arguments; raises ConfigError for fewer than one."""
    if count < 1:
        raise ConfigError(f"--{split}", count, "there must be at least one question", f"Give --{split} 1 or more")
    draw = random.Random(f"{DATA_SOURCE}/{split}/{seed}")
    pairs = [(draw.randint(10, 99), draw.randint(10, 99)) for _ in range(count)]
    return [
        {
            "data_source": DATA_SOURCE,
            "agent_name": AGENTS[index % len(AGENTS)],
            "prompt": [{"role": "user", "content": f"What is {left}+{right}?"}],
            "ability": "tools",
            "reward_model": {"style": "rule", "ground_truth": str(left + right)},
            "extra_info": {"split": split, "index": index},
        }
        for index, (left, right) in enumerate(pairs)
    ]


@exits_on_config_error
def main() -> int:
    """Exit code 0, or 2 with one line on standard error for a setting that cannot work."""
    parser = argparse.ArgumentParser(description="Make the recipe's model and data.")
    parser.add_argument("--out", type=Path, required=True, help="folder for model/ and the parquet files")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the data")
    parser.add_argument("--train", type=int, default=64, help="questions to train on")
    parser.add_argument("--val", type=int, default=8, help="questions to validate on")
    options = parser.parse_args()
    splits = {split: rows(split, options.seed, getattr(options, split)) for split in ("train", "val")}
    with writing_to(options.out):
        for split, questions in splits.items():
            write_parquet(options.out / f"{split}.parquet", questions)
        keep_or_make_model("nano", options.seed, options.out / "model")
    return 0


if __name__ == "__main__":
    sys.exit(main())
