"""Makes `train.parquet` and `val.parquet` of the agent's tasks, from a file with one JSON object a line.

    python recipes/swe_agent_32b/data.py --tasks FILE --out DIR [--val 64] [--seed 0]

A task has `id`, `issue` (what is to be done), `image` (of a container with the repository), `folder` (of the repository
in there), `tests` (a shell command that ends with 0 when they pass) and, if you like, `test_patch` (applied before).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from seamless_verl.errors import ConfigError, exits_on_config_error

FIELDS = ("id", "issue", "image", "folder", "tests")


@exits_on_config_error
def main() -> int:
    """Exit code 0, or 2 with one line on standard error for a setting that cannot work."""
    parser = argparse.ArgumentParser(description="Make the agent's data.")
    parser.add_argument("--tasks", type=Path, required=True, help="a file of tasks, one JSON object a line")
    parser.add_argument("--out", type=Path, required=True, help="folder for the parquet files")
    parser.add_argument("--val", type=int, default=64, help="tasks to validate on")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of these")
    options = parser.parse_args()
    tasks = list(read(options.tasks))
    if not 1 <= options.val < len(tasks):
        raise ConfigError("--val", options.val, f"there are {len(tasks)} tasks", "Give at least 1, and fewer than all")
    random.Random(options.seed).shuffle(tasks)
    options.out.mkdir(parents=True, exist_ok=True)
    write(tasks[: options.val], options.out / "val.parquet")
    write(tasks[options.val :], options.out / "train.parquet")
    return 0


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The tasks of a file; raises ConfigError with the line of one that is not whole."""
    if not path.is_file():
        raise ConfigError("--tasks", str(path), "there is no such file", "Name a file with one JSON object a line")
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            task = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError("--tasks", str(path), f"line {number}: {error}", "Write one JSON object a line") from None
        missing = [name for name in FIELDS if not isinstance(task, dict) or not task.get(name)]
        if missing:
            reason, way_out = f"line {number} has no {missing[0]}", f"Each task needs {', '.join(FIELDS)}"
            raise ConfigError("--tasks", str(path), reason, way_out)
        yield task


def write(tasks: Sequence[dict[str, Any]], target: Path) -> None:
    temporary = target.with_suffix(f".{os.getpid()}")
    parquet.write_table(pa.Table.from_pylist([row(task) for task in tasks]), temporary)
    os.replace(temporary, target)


def row(task: dict[str, Any]) -> dict[str, Any]:
    """verl's columns; the tests are in `extra_info`, which the agent's model does not see."""
    info = {name: str(task.get(name) or "") for name in ("image", "folder", "tests", "test_patch")}
    return {
        "data_source": "swe_agent_32b",
        "prompt": [{"role": "user", "content": task["issue"]}],
        "reward_model": {"style": "rule", "ground_truth": ""},
        "extra_info": {"index": str(task["id"]), **info},
    }


if __name__ == "__main__":
    sys.exit(main())
