"""Writes an environment's tasks, a line of JSON each, as verl's parquet files; and a model of random weights if asked.

    environment.py COUNT | python recipes/verifiers_env/data.py --out DIR [--val 64] [--make-model FOLDER]

The last `--val` of them are for validation.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from seamless_verl.errors import ConfigError, exits_on_config_error
from seamless_verl.tiny import keep_or_make_model
from seamless_verl.tiny.files import writing_to
from seamless_verl.tiny.task import write_parquet


def in_verls_format(task: dict[str, Any], split: str) -> dict[str, Any]:
    """The reward comes from the environment; verl wants a ground truth all the same."""
    return {
        "data_source": task.get("source", "verifiers"),
        "prompt": task["prompt"],
        "ability": "verifiers",
        "reward_model": {"style": "rule", "ground_truth": ""},
        "extra_info": {"split": split, "index": task["index"], "key": task["key"]},
    }


@exits_on_config_error
def main() -> int:
    """Exit code 0, or 2 with one line on standard error for a setting that cannot work."""
    parser = argparse.ArgumentParser(description="Write an environment's tasks as verl's data.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the parquet files")
    parser.add_argument("--val", type=int, default=64, help="tasks to validate on")
    parser.add_argument("--make-model", type=Path, help="folder for a model of random weights, unless it has one")
    options = parser.parse_args()
    tasks = [json.loads(line) for line in sys.stdin]
    if not 1 <= options.val < len(tasks):
        reason = f"the environment gave {len(tasks)} tasks, of which one at least is to be trained"
        raise ConfigError("--val", options.val, reason, "Ask for fewer, or for more tasks: TASKS")
    with writing_to(options.out):
        for split, part in (("train", tasks[: -options.val]), ("val", tasks[-options.val :])):
            write_parquet(options.out / f"{split}.parquet", [in_verls_format(task, split) for task in part])
        if options.make_model:
            keep_or_make_model("nano", 0, options.make_model)
    return 0


if __name__ == "__main__":
    sys.exit(main())
