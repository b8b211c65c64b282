"""Writes a folder of tasks in Harbor's layout as verl's parquet files; and a model of random weights if asked.

python recipes/harbor_tasks/data.py --out DIR --tasks FOLDER [--val FOLDER] [--time-limit-s 1800] [--make-model FOLDER]

Each task is read, and a command run in its environment, so that what cannot run here is refused by name before the run.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from harbor_task import HarborTask, read_task
from sandbox import sandbox_of
from trial import NOBODY, agent_in

from seamless_verl.agents.command import run_command
from seamless_verl.agents.failures import ToolFailedError
from seamless_verl.agents.outcome import AgentStatus
from seamless_verl.errors import ConfigError, exits_on_config_error
from seamless_verl.tiny import keep_or_make_model
from seamless_verl.tiny.files import writing_to
from seamless_verl.tiny.task import write_parquet


def tasks_of(folder: Path, limit_s: float) -> list[HarborTask]:
    tasks = [read_task(path.parent) for path in sorted(folder.resolve().glob("*/task.toml"))]
    if not tasks:
        raise ConfigError("TASKS", str(folder), "has no folder with a task.toml", "Name a folder of Harbor's tasks")
    for task in tasks:
        if (needs := (task.agent_s or 60.0) + task.verifier_s) > limit_s:
            reason = f"{task.folder.name} takes up to {needs:g} s: its agent's time and its verifier's"
            raise ConfigError("TIME_LIMIT_S", limit_s, reason, f"Set TIME_LIMIT_S={needs:.0f} or more")
        asyncio.run(make_once(task))
    return tasks


async def make_once(task: HarborTask) -> None:
    try:
        async with sandbox_of(task) as sandbox:
            ended = await run_command(replace(agent_in(sandbox), command="true").limited(60.0), {}, NOBODY)
            if ended.status is not AgentStatus.FINISHED:
                raise ToolFailedError(f"{ended.error}: {ended.output[-500:]}")
    except ConfigError:
        raise
    except (ToolFailedError, OSError, ValueError) as error:
        reason = f"its environment cannot be made: {error}"
        raise ConfigError("task", str(task.folder), reason, "Correct it, or take it out") from error


def in_verls_format(task: HarborTask, split: str, index: int) -> dict[str, Any]:
    """The reward comes from the verifier; verl wants a ground truth all the same."""
    return {
        "data_source": "harbor",
        "prompt": [{"role": "user", "content": task.instruction}],
        "ability": "terminal",
        "reward_model": {"style": "rule", "ground_truth": ""},
        "extra_info": {"split": split, "index": index, "folder": str(task.folder)},
    }


@exits_on_config_error
def main() -> int:
    """Exit code 0, or 2 with one line on standard error for a task or a setting that cannot work."""
    parser = argparse.ArgumentParser(description="Write tasks in Harbor's layout as verl's data.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the parquet files")
    parser.add_argument("--tasks", type=Path, required=True, help="folder of tasks to train on")
    parser.add_argument("--val", type=Path, help="folder of tasks to validate on; those to train on without it")
    parser.add_argument("--time-limit-s", type=float, default=1800.0, help="the agent loop's time limit")
    parser.add_argument("--make-model", type=Path, help="folder for a model of random weights, unless it has one")
    options = parser.parse_args()
    with writing_to(options.out):
        for split, folder in (("train", options.tasks), ("val", options.val or options.tasks)):
            tasks = tasks_of(folder, options.time_limit_s)
            rows = [in_verls_format(task, split, index) for index, task in enumerate(tasks)]
            write_parquet(options.out / f"{split}.parquet", rows)
        if options.make_model:
            keep_or_make_model("nano", 0, options.make_model)
    return 0


if __name__ == "__main__":
    sys.exit(main())
