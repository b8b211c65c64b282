"""`python -m seamless_verl.bench.rewards --arms sync,seamless --seeds 1,2,3 --steps 60`.

Runs a recipe's `run.sh` once for each trainer and seed, seed by seed, and compares what they learned. A step takes
as many samples in every arm. An arm is a `trainer.v1.trainer_mode`, and may have settings of its own:
`seamless:seamless.max_staleness=4:seamless.ahead=1`; for verl's own modes it is verl's own task runner.
Each run has a folder `OUT/<arm>-seed<seed>`; one that is finished there is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from seamless_verl.bench.rewards.curves import LAST, rewards, table
from seamless_verl.bench.training.running import leave_on_signals, process_of
from seamless_verl.config.checks.modes import MODES
from seamless_verl.errors import ConfigError, refusing

METRICS, LOG, DONE = "metrics.jsonl", "log.txt", "done"


@dataclass(frozen=True)
class SeedRun:
    arm: str
    seed: int
    folder: Path
    options: Sequence[str]

    def command(self, recipe: Path) -> list[str]:
        mode, *own = self.arm.split(":")
        places = [f"trainer.default_local_dir={self.folder}/checkpoints", f"hydra.run.dir={self.folder}/hydra"]
        here = [f"trainer.v1.trainer_mode={mode}", f"data.seed={self.seed}", "trainer.logger=[console,file]"]
        return [str(recipe / "run.sh"), *here, *places, "trainer.resume_mode=disable", *self.options, *own]

    def environment(self, data: Path) -> dict[str, str]:
        metrics = str(self.folder / METRICS)
        return os.environ | {"DATA": str(data), "VERL_FILE_LOGGER_PATH": metrics, "PYTHON": sys.executable}

    def curve(self) -> dict[int, float]:
        return rewards([json.loads(line) for line in (self.folder / METRICS).read_text().splitlines()])


@refusing
def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0; 1 when a run failed; 2 for a setting that cannot work."""
    options = parser().parse_args(arguments)
    recipe, out = options.recipe.absolute(), options.out.absolute()
    if not (recipe / "run.sh").is_file():
        raise ConfigError("--recipe", str(recipe), "has no run.sh", "Give the folder of a recipe")
    seeds, arms = seeds_of(options.seeds), arms_of(options.arms)
    if options.steps < LAST * options.every:
        way_out = f"Give --steps {LAST * options.every} or more, or a smaller --every"
        raise ConfigError("--steps", options.steps, f"holds fewer than {LAST} validations", way_out)
    more = [f"trainer.total_training_steps={options.steps}", f"trainer.test_freq={options.every}", *options.set]
    more += ["trainer.val_before_train=True", "trainer.save_freq=-1"]
    runs = [SeedRun(arm, seed, out / f"{named(arm)}-seed{seed}", more) for seed in seeds for arm in arms]
    for one in runs:
        if not finished(one, recipe, out / "data"):
            return 1
    curves = {arm: [one.curve() for one in runs if one.arm == arm] for arm in arms}
    sys.stdout.write("".join(f"{line}\n" for line in table(curves)))
    return 0


def parser() -> argparse.ArgumentParser:
    ours = argparse.ArgumentParser(
        prog="python -m seamless_verl.bench.rewards",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ours.add_argument("--recipe", type=Path, default=Path("recipes/arithmetic_grpo"), help="its folder")
    ours.add_argument("--arms", default="sync,seamless", help="the first is what the others are compared with")
    ours.add_argument("--seeds", default="1,2,3", help="of the data's order, which are two or more")
    ours.add_argument("--steps", type=int, default=60, help="of each run")
    ours.add_argument("--every", type=int, default=5, help="steps from a validation to the next")
    ours.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override in every run")
    ours.add_argument("--out", type=Path, default=Path("runs/rewards"))
    return ours


def seeds_of(text: str) -> list[int]:
    seeds = [int(one) for one in text.split(",")] if re.fullmatch(r"\d+(,\d+)*", text) else []
    if len(set(seeds)) < max(2, len(seeds)):
        raise ConfigError("--seeds", text, "are not two or more numbers, all different", "Write them as --seeds 1,2,3")
    return seeds


def arms_of(text: str) -> list[str]:
    arms = text.split(",")
    for arm in arms:
        mode, *own = arm.split(":")
        if mode not in MODES or any("=" not in one for one in own):
            way_out = f"Write it as one of {', '.join(MODES)}, with settings as in seamless:seamless.ahead=1"
            raise ConfigError("--arms", arm, "is no trainer mode with settings", way_out)
    if len({named(arm) for arm in arms}) < len(arms):
        raise ConfigError("--arms", text, "names one twice", "Name each once")
    return arms


def named(arm: str) -> str:
    """As a folder's name, which stands in hydra's overrides."""
    return re.sub(r"[^\w.-]+", "_", arm)


def finished(one: SeedRun, recipe: Path, data: Path) -> bool:
    """Run it to its end, unless it was; whether it succeeded."""
    settings = json.dumps(one.command(recipe))
    done = one.folder / DONE
    if done.is_file() and done.read_text() == settings:
        return True
    one.folder.mkdir(parents=True, exist_ok=True)
    for file in (done, one.folder / METRICS):
        file.unlink(missing_ok=True)
    with (one.folder / LOG).open("wb") as log:
        whole = {"env": one.environment(data), "stdout": log, "stderr": subprocess.STDOUT, "start_new_session": True}
        with process_of(one.command(recipe), group=True, **whole) as process:  # it prepares before it becomes the run
            code = process.wait()
    if code != 0 or not one.curve():
        found = f"code {code}" if code else "no validation reward"
        sys.stderr.write(f"{one.folder.name}: {found}, see {one.folder / LOG}\n")
        return False
    done.write_text(settings)
    sys.stderr.write(f"{one.folder.name}: {max(one.curve().items())[1]:.3f} at the end\n")
    return True


if __name__ == "__main__":
    leave_on_signals()
    sys.exit(main())
