"""The command `python -m seamless_verl.bench.rewards --arms sync,seamless --seeds 1,2,3 --steps 60`.

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

from seamless_verl.bench.rewards.validation_curves import LAST, read_validation_curve, report_lines
from seamless_verl.compare.arms import folder_name
from seamless_verl.compare.processes import exit_on_signals, managed_process
from seamless_verl.config.checks.modes import MODES
from seamless_verl.errors import ConfigError, exits_on_config_error

METRICS, LOG, DONE = "metrics.jsonl", "log.txt", "done"


@dataclass(frozen=True)
class SeedRun:
    arm: str
    seed: int
    folder: Path
    options: Sequence[str]

    def command(self, recipe: Path) -> list[str]:
        mode, *settings = self.arm.split(":")
        places = [f"trainer.default_local_dir={self.folder}/checkpoints", f"hydra.run.dir={self.folder}/hydra"]
        overrides = [f"trainer.v1.trainer_mode={mode}", f"data.seed={self.seed}", "trainer.logger=[console,file]"]
        return [str(recipe / "run.sh"), *overrides, *places, "trainer.resume_mode=disable", *self.options, *settings]

    def environment(self, data: Path) -> dict[str, str]:
        metrics = str(self.folder / METRICS)
        return os.environ | {"DATA": str(data), "VERL_FILE_LOGGER_PATH": metrics, "PYTHON": sys.executable}

    def validation_curve(self) -> dict[int, float]:
        return read_validation_curve([json.loads(line) for line in (self.folder / METRICS).read_text().splitlines()])


@exits_on_config_error
def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0; 1 when a run failed; 2 for a setting that cannot work."""
    options = make_parser().parse_args(arguments)
    recipe, out = options.recipe.absolute(), options.out.absolute()
    if not (recipe / "run.sh").is_file():
        raise ConfigError("--recipe", str(recipe), "has no run.sh", "Give the folder of a recipe")
    seeds, arms = parse_seeds(options.seeds), parse_arms(options.arms)
    if options.steps < LAST * options.every:
        way_out = f"Give --steps {LAST * options.every} or more, or a smaller --every"
        raise ConfigError("--steps", options.steps, f"holds fewer than {LAST} validations", way_out)
    shared = [f"trainer.total_training_steps={options.steps}", f"trainer.test_freq={options.every}", *options.set]
    shared += ["trainer.val_before_train=True", "trainer.save_freq=-1"]
    runs = [SeedRun(arm, seed, out / f"{folder_name(arm)}-seed{seed}", shared) for seed in seeds for arm in arms]
    for run in runs:
        if not run_to_end(run, recipe, out / "data"):
            return 1
    validation_curves = {arm: [run.validation_curve() for run in runs if run.arm == arm] for arm in arms}
    sys.stdout.write("".join(f"{line}\n" for line in report_lines(validation_curves)))
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m seamless_verl.bench.rewards",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--recipe", type=Path, default=Path("recipes/arithmetic_grpo"), help="its folder")
    parser.add_argument("--arms", default="sync,seamless", help="the first is what the others are compared with")
    parser.add_argument("--seeds", default="1,2,3", help="of the data's order, which are two or more")
    parser.add_argument("--steps", type=int, default=60, help="of each run")
    parser.add_argument("--every", type=int, default=5, help="steps from a validation to the next")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override in every run")
    parser.add_argument("--out", type=Path, default=Path("runs/rewards"))
    return parser


def parse_seeds(text: str) -> list[int]:
    seeds = [int(seed) for seed in text.split(",")] if re.fullmatch(r"\d+(,\d+)*", text) else []
    if len(set(seeds)) < max(2, len(seeds)):
        raise ConfigError("--seeds", text, "are not two or more numbers, all different", "Write them as --seeds 1,2,3")
    return seeds


def parse_arms(text: str) -> list[str]:
    arms = text.split(",")
    for arm in arms:
        mode, *settings = arm.split(":")
        if mode not in MODES or any("=" not in setting for setting in settings):
            way_out = f"Write it as one of {', '.join(MODES)}, with settings as in seamless:seamless.ahead=1"
            raise ConfigError("--arms", arm, "is no trainer mode with settings", way_out)
    if len({folder_name(arm) for arm in arms}) < len(arms):
        raise ConfigError("--arms", text, "names one twice", "Name each once")
    return arms


def run_to_end(run: SeedRun, recipe: Path, data: Path) -> bool:
    """Make a run unless it is finished; whether it succeeded."""
    settings = json.dumps(run.command(recipe))
    done = run.folder / DONE
    if done.is_file() and done.read_text() == settings:
        return True
    run.folder.mkdir(parents=True, exist_ok=True)
    for file in (done, run.folder / METRICS):
        file.unlink(missing_ok=True)
    with (run.folder / LOG).open("wb") as log:
        popen_options = {
            "env": run.environment(data),
            "stdout": log,
            "stderr": subprocess.STDOUT,
            "start_new_session": True,
        }
        # with its group: run.sh prepares in further processes before it execs the job
        with managed_process(run.command(recipe), group=True, **popen_options) as process:
            code = process.wait()
    if code != 0 or not run.validation_curve():
        found = f"code {code}" if code else "no validation reward"
        sys.stderr.write(f"{run.folder.name}: {found}, see {run.folder / LOG}\n")
        return False
    done.write_text(settings)
    sys.stderr.write(f"{run.folder.name}: {max(run.validation_curve().items())[1]:.3f} at the end\n")
    return True


if __name__ == "__main__":
    exit_on_signals()
    sys.exit(main())
