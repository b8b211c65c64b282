"""What is compared: a recipe, a workload, a config file, or overrides alone; the user's options, and the runs.

Every run is made by `seamless_verl.main_ppo`, which for verl's modes runs verl's own trainers and nothing of ours but
the supervisor that ends what a run leaves.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from seamless_verl.config.words import quoted
from seamless_verl.errors import ConfigError
from seamless_verl.tools.compare.arms import ComparedArm, folder_name
from seamless_verl.tools.compare.figures import LAST, check_skip
from seamless_verl.tools.compare.running import METRICS_FILE
from seamless_verl.tools.compare.workloads import WORKLOADS, Workload, workload_overrides

MAIN, PROBE = "seamless_verl.main_ppo", "seamless_verl.tools.compare.probe"
RESULT = "SEAMLESS_PROBE"  # names the file in which a probe writes what it found
RECIPES = Path(__file__).parents[3] / "recipes"
SCRIPT = "run.sh"
READS_MAIN = re.compile(r"^(?!\s*#).*\$\{?MAIN\b", re.MULTILINE)
SEARCH_PATH = "hydra.searchpath=[pkg://seamless_verl.config]"


@dataclass(frozen=True)
class Job:
    """What is compared: the recipe's script, or else a config file, or else verl's own defaults under our config.

    `overrides` are those of every arm; `data` is the folder in which a recipe or a workload keeps its model and its
    data. `rates` are tokens a second of an engine alone by samples in flight, where they were measured.
    """

    name: str
    script: Path | None
    config: Path | None
    overrides: tuple[str, ...]
    data: Path
    workload: Workload | None = None
    rates: Mapping[int, float] = field(default_factory=dict)

    def command(self, overrides: Sequence[str]) -> list[str]:
        """The command line of a run; hydra takes the last one of two values for a key."""
        all_overrides = [*self.overrides, *overrides]
        if self.script is not None:
            return [str(self.script), *all_overrides]
        command = [sys.executable, "-W", "ignore", "-m", MAIN]
        if self.config is not None:
            command += ["--config-dir", str(self.config.parent), "--config-name", self.config.stem, SEARCH_PATH]
        return [*command, *all_overrides]

    def own_environment(self, folder: Path) -> dict[str, str]:
        """Where the run's metrics are, and what a recipe's script reads: the folder of its data, and what runs it."""
        own = {"VERL_FILE_LOGGER_PATH": str(folder / METRICS_FILE)}
        recipes = {"DATA": str(self.data), "PYTHON": sys.executable, "MAIN": MAIN}
        return own | (recipes if self.script is not None else {})

    def environment(self, folder: Path) -> dict[str, str]:
        """What the user exported, and what the run has of its own."""
        return {"HF_HUB_OFFLINE": "1", **os.environ, **self.own_environment(folder)}

    def probe(self, overrides: Sequence[str], folder: Path, result: Path) -> tuple[list[str], dict[str, str]]:
        """The command line and the environment that check the same run, start nothing, and write to `result`.

        A recipe's script reads MAIN instead of the command line.
        """
        command = [PROBE if part == MAIN else part for part in self.command(overrides)]
        return command, self.environment(folder) | {"MAIN": PROBE, RESULT: str(result)}


def job_named(target: str | None, overrides: Sequence[str], out: Path) -> Job:
    """The job of a workload's name, of a recipe's name or folder, of a config file, or of overrides alone.

    Raises:
        ConfigError: there is no such recipe or file, or it cannot be checked before it is run.
    """
    data = out / "data"
    if target is None:
        return Job("job", None, None, tuple(overrides), data)
    if target in WORKLOADS:
        workload = WORKLOADS[target]
        return Job(target, None, None, (*workload_overrides(workload, data), *overrides), data, workload)
    for folder in (Path(target), RECIPES / target):
        if (folder / SCRIPT).is_file():
            check_script(folder / SCRIPT)
            return Job(folder.resolve().name, (folder / SCRIPT).resolve(), None, tuple(overrides), data)
    file = Path(target)
    if file.is_file() and file.suffix in (".yaml", ".yml"):
        check_config(file)
        return Job(file.stem, None, file.resolve(), tuple(overrides), data)
    names = ", ".join(sorted(script.parent.name for script in RECIPES.glob(f"*/{SCRIPT}") if reads_main(script)))
    way_out = f"Give a recipe ({names or 'a folder with a run.sh'}), a workload ({', '.join(WORKLOADS)}), "
    way_out += "a .yaml file, or KEY=VALUE alone"
    raise ConfigError("CONFIG|RECIPE", target, "is no recipe and no config file", way_out)


def reads_main(script: Path) -> bool:
    """Whether the script runs what MAIN names, outside of its comments."""
    return READS_MAIN.search(script.read_text(encoding="utf-8", errors="replace")) is not None


def check_script(script: Path) -> None:
    """ConfigError for a script that would train where it is only to be checked."""
    if not reads_main(script):
        reason = "does not read MAIN, by which it is told to check its settings instead of training"
        raise ConfigError("CONFIG|RECIPE", str(script), reason, f'End it in -m "${{MAIN:-{MAIN}}}"')


def check_config(file: Path) -> None:
    """ConfigError for a file that hydra would not read: it takes names that end in .yaml, and a mapping."""
    if file.suffix != ".yaml":
        way_out = f"Name it {file.stem}.yaml"
        raise ConfigError("CONFIG|RECIPE", str(file), "hydra reads config files whose names end in .yaml", way_out)
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = f"is not YAML: {' '.join(str(error).split())}"
        raise ConfigError("CONFIG|RECIPE", str(file), reason, "Correct the file") from error
    except OSError as error:
        raise ConfigError("CONFIG|RECIPE", str(file), f"cannot be read: {error.strerror}", "Allow it") from error
    if not isinstance(tree, dict | None):
        raise ConfigError("CONFIG|RECIPE", str(file), "has no settings by name", "Write them as key: value")


STEPS, SKIP, TIMEOUT_S = 15, 4, 3600.0


@dataclass(frozen=True)
class Options:
    """What the user asked for. `validate` is the steps from a validation to the next, 0 for none.

    `equal_tokens` compares arms after as many generated tokens too, and lets them differ in what methods differ in.
    `target_reward` is None for the baseline's; `bounds` and `rates` are those of `arms.repeated`, `short_poll` is for
    verl's modes, and `bound` for a workload's report.
    """

    steps: int = STEPS
    skip: int = SKIP
    seeds: tuple[int, ...] = (1, 2)
    rounds: int = 1
    validate: int = 0
    devices: int | None = None
    timeout_s: float = TIMEOUT_S
    equal_tokens: bool = False
    target_reward: float | None = None
    bounds: tuple[int, ...] = ()
    rates: tuple[str, ...] = ()
    short_poll: bool = False
    bound: bool = False

    def check(self) -> None:
        """ConfigError for what cannot work."""
        check_skip(self.skip, self.steps)
        if self.rounds < 1:
            raise ConfigError("--rounds", self.rounds, "makes no run", "Give --rounds 1 or more")
        if len(set(self.seeds)) < len(self.seeds):
            raise ConfigError("--seeds", list(self.seeds), "names one twice", "Name each once; --rounds repeats them")
        if self.validate < 0:
            way_out = "Give the steps from one to the next, or 0 for none"
            raise ConfigError("--validate", self.validate, "is no number of steps", way_out)
        if self.steps < LAST * self.validate:
            way_out = f"Give --steps {LAST * self.validate} or more, or a smaller --validate"
            reason = f"{self.steps} steps hold fewer than {LAST} validations"
            raise ConfigError("--validate", self.validate, reason, way_out)
        if self.equal_tokens and not self.validate:
            reason = "with --equal-tokens the rewards of trained samples are of the prompts that a method chose"
            raise ConfigError("--validate", self.validate, reason, "Give --validate N")
        if self.devices is not None and self.devices < 1:
            raise ConfigError("--devices", self.devices, "is no number of devices", "Give 1 or more")
        if self.target_reward is not None and not math.isfinite(self.target_reward):
            raise ConfigError("--target-reward", self.target_reward, "is no reward", "Give a number")
        if not self.timeout_s > 0:  # nan too
            raise ConfigError("--timeout", self.timeout_s, "is no time for a run", "Give seconds, more than 0")


@dataclass(frozen=True)
class PlannedRun:
    """A run that is to be made, in a folder of its own."""

    arm: ComparedArm
    seed: int
    round: int
    folder: Path

    @property
    def key(self) -> tuple[str, int, int]:
        return self.arm.name, self.seed, self.round

    @property
    def checkpoints(self) -> Path:
        """Where a run would save, and writes what it has besides."""
        return self.folder / "checkpoints"


def check_arms(arms: Sequence[ComparedArm], options: Options) -> None:
    """ConfigError for arms that an option is not for: their generated tokens are not counted, or they do not poll."""
    verls = [arm.text for arm in arms if not arm.is_ours]
    if options.short_poll and not verls:
        way_out = "Name one of verl's modes among --arms, or leave --short-poll out"
        reason = "--short-poll is for verl's modes, and none is there"
        raise ConfigError("--arms", [arm.text for arm in arms], reason, way_out)
    if options.equal_tokens and verls:
        reason = "verl's modes do not log the tokens that they generate, by which --equal-tokens compares"
        way_out = "Give --arms in mode seamless alone, such as grpo:seamless.sampler.name=null"
        raise ConfigError("--arms", verls[0], reason, way_out)


def shared_overrides(options: Options, seed: int, folder: Path) -> list[str]:
    """What every arm has alike, and the places of one run."""
    return [
        f"trainer.total_training_steps={options.steps}",
        f"trainer.test_freq={options.validate or -1}",
        f"trainer.val_before_train={options.validate > 0}",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        "trainer.logger=[console,file]",
        f"data.seed={seed}",
        f"trainer.default_local_dir={quoted(str(folder / 'checkpoints'))}",
        f"hydra.run.dir={quoted(str(folder / 'hydra'))}",
    ]


def planned_runs(arms: Sequence[ComparedArm], options: Options, out: Path) -> Iterator[PlannedRun]:
    """All runs in the order in which they are made: every arm once for a seed, every second time in reverse order.

    So no arm always comes first.
    """
    pairs = [(seed, number) for number in range(1, options.rounds + 1) for seed in options.seeds]
    for index, (seed, number) in enumerate(pairs):
        for arm in reversed(arms) if index % 2 else arms:
            yield PlannedRun(arm, seed, number, out / f"{folder_name(arm.name)}-seed{seed}-r{number}")
