"""A recipe's job in the place of a training one: it answers a probe, or logs steps as verl does.

`run.sh` of the recipe calls it with hydra's overrides. `colocate_async` is refused, `separate_async` fails after a
step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

STEP_S = {"sync": 0.4, "seamless": 0.2, "separate_async": 0.1}


def main() -> int:
    given = dict(text.lstrip("+").split("=", 1) for text in sys.argv[1:] if not text.startswith("hydra."))
    mode = given.get("trainer.v1.trainer_mode", "seamless")
    if os.environ["MAIN"] == "seamless_verl.tools.compare.probe":
        return probe(given, mode)
    if mode == "seamless":
        record_lengths(Path(given["trainer.default_local_dir"].strip("'")), int(given.get("seamless.max_staleness", 0)))
    with Path(os.environ["VERL_FILE_LOGGER_PATH"]).open("wb", buffering=0) as file:
        for step in range(1, int(given["trainer.total_training_steps"]) + 1):
            time.sleep(STEP_S[mode])
            data = metrics(step, validated=given["trainer.test_freq"] != "-1")
            file.write(json.dumps({"step": step, "data": data}).encode() + b"\n")
            if mode == "separate_async":
                print("the engine has no memory")  # noqa: T201
                return 3
            if given.get("hang") == "1" and step == 2:
                subprocess.run(["sleep", "600"])  # a child, which has to be ended too
    return 0


def probe(given: dict[str, str], mode: str) -> int:
    """The composed config, of which a comparison needs these keys."""
    if mode == "colocate_async":
        print("trainer.v1.trainer_mode='colocate_async': is not for this model. Choose another")  # noqa: T201
        return 2
    tree: dict[str, Any] = {"trainer": {"n_gpus_per_node": 1, "device": "cpu", "nnodes": 1}}
    defaults = {"data.train_batch_size": 4, "actor_rollout_ref.rollout.n": 2}
    defaults |= {"actor_rollout_ref.actor.ppo_mini_batch_size": 2, "trainer.v1.trainer_mode": mode}
    for key, value in {**defaults, **given}.items():
        *parents, last = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = int(value) if str(value).lstrip("-").isdigit() else value
    Path(os.environ["SEAMLESS_PROBE"]).write_text(json.dumps({"config": tree, "cores": 2}))
    return 0


def record_lengths(folder: Path, staleness: int) -> None:
    """Four prompts of two samples, one of them long, in whose place a short one is trained where staleness lets it."""
    lengths = {"0": [4, 5], "1": [90, 95], "2": [3, 4], "3": [2, 3], "4": [3, 3]}
    folder.mkdir(parents=True, exist_ok=True)
    row = {"step": 1, "begun": 5, "lengths": lengths, "trained": [0, 2, 3, 4] if staleness else [0, 1, 2, 3]}
    (folder / "lengths.jsonl").write_text(json.dumps(row) + "\n")


def metrics(step: int, validated: bool) -> dict[str, float]:
    validation = {"val-core/task/reward/mean@1": step / 10} if validated else {}
    return validation | {
        "calls/tokens": 50 * step,
        "perf/total_num_tokens": 104,
        "response_length/mean": 4.0,
        "prompt_length/mean": 9.0,
        "critic/score/mean": step / 10,
        "training/off_policy/trajectory_staleness_worst/mean": 0.5,
        "training/off_policy/trajectory_staleness_worst/max": 1,
    }


if __name__ == "__main__":
    sys.exit(main())
