"""The command `python -m seamless_verl.tools.bench.rewards --arms sync,seamless --seeds 1,2,3 --steps 60`.

Runs a recipe's `run.sh` once for each trainer and seed, seed by seed, and compares what they learned. A step takes
as many samples in every arm. An arm is a `trainer.v1.trainer_mode`, and may have settings of its own:
`seamless:seamless.max_staleness=4:seamless.ahead=1`; for verl's own modes it is verl's own task runner.
Each run has a folder `OUT/<arm>-seed<seed>`; one that is finished there is not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from seamless_verl.config.words import quoted
from seamless_verl.errors import ConfigError, exits_on_config_error
from seamless_verl.tools.bench.rewards.validation_curves import read_validation_curve, report_lines
from seamless_verl.tools.compare.arms import MODE, folder_name, parse_arm, parse_arms
from seamless_verl.tools.compare.figures import LAST
from seamless_verl.tools.compare.machine import differ, identity, machine
from seamless_verl.tools.compare.processes import RunFailedError, exit_on_signals
from seamless_verl.tools.compare.running import LOG_FILE, METRICS_FILE, run_logged

DONE, MACHINE = "done", "machine.json"


@dataclass(frozen=True)
class SeedRun:
    arm: str
    seed: int
    folder: Path
    options: Sequence[str]

    def command(self, recipe: Path) -> list[str]:
        arm = parse_arm(self.arm)
        places = [
            f"trainer.default_local_dir={quoted(str(self.folder / 'checkpoints'))}",
            f"hydra.run.dir={quoted(str(self.folder / 'hydra'))}",
        ]
        overrides = [f"{MODE}={arm.mode}", f"data.seed={self.seed}", "trainer.logger=[console,file]"]
        return [
            str(recipe / "run.sh"),
            *overrides,
            *places,
            "trainer.resume_mode=disable",
            *self.options,
            *arm.settings,
        ]

    def environment(self, data: Path) -> dict[str, str]:
        metrics = str(self.folder / METRICS_FILE)
        return os.environ | {"DATA": str(data), "VERL_FILE_LOGGER_PATH": metrics, "PYTHON": sys.executable}

    def validation_curve(self) -> dict[int, float]:
        return read_validation_curve(
            [json.loads(line) for line in (self.folder / METRICS_FILE).read_text().splitlines()]
        )


@exits_on_config_error
def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0; 1 when a run failed; 2 for a setting that cannot work."""
    options = make_parser().parse_args(arguments)
    recipe, out = options.recipe.absolute(), options.out.absolute()
    if not (recipe / "run.sh").is_file():
        raise ConfigError("--recipe", str(recipe), "has no run.sh", "Give the folder of a recipe")
    seeds, arms = parse_seeds(options.seeds), [arm.text for arm in parse_arms(options.arms)]
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
        prog="python -m seamless_verl.tools.bench.rewards",
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


def run_to_end(run: SeedRun, recipe: Path, data: Path) -> bool:
    """Make a run unless it is finished; whether it succeeded."""
    settings = json.dumps(run.command(recipe))
    done = run.folder / DONE
    place = run.folder / MACHINE
    if done.is_file() and (run.folder / METRICS_FILE).is_file() and done.read_text() == settings:
        there = json.loads(place.read_text()) if place.is_file() else {}
        if differ(there, here := identity(machine())):
            sys.stderr.write(f"{run.folder.name}: was made on another machine, {there}, and this one is {here}\n")
        return True
    run.folder.mkdir(parents=True, exist_ok=True)
    for file in (done, run.folder / METRICS_FILE):
        file.unlink(missing_ok=True)
    log = run.folder / LOG_FILE
    try:
        # with its group: run.sh prepares in further processes before it execs the job
        command, env = run.command(recipe), run.environment(data)
        run_logged(command, run.folder, env, steps=0, timeout_s=math.inf, group=True)
    except RunFailedError as error:
        sys.stderr.write(f"{run.folder.name}: {str(error).partition(',')[0]}, see {log}\n")
        return False
    if not run.validation_curve():
        sys.stderr.write(f"{run.folder.name}: no validation reward, see {log}\n")
        return False
    place.write_text(json.dumps(identity(machine())))
    done.write_text(settings)
    sys.stderr.write(f"{run.folder.name}: {max(run.validation_curve().items())[1]:.3f} at the end\n")
    return True


if __name__ == "__main__":
    exit_on_signals()
    sys.exit(main())
