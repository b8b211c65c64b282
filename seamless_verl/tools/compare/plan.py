"""What a comparison will do: the user's options, and its runs in the order in which they are made. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from seamless_verl.config.words import quoted
from seamless_verl.errors import ConfigError
from seamless_verl.tools.compare.arms import ComparedArm, folder_name, interleaved
from seamless_verl.tools.compare.figures import LAST, check_skip

STEPS, SKIP = 15, 4


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
    timeout_s: float = 3600.0
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
        f"trainer.default_local_dir={quoted(str(checkpoints(folder)))}",
        f"hydra.run.dir={quoted(str(folder / 'hydra'))}",
    ]


def checkpoints(folder: Path) -> Path:
    """Where a run would save, and writes what it has besides."""
    return folder / "checkpoints"


def planned_runs(arms: Sequence[ComparedArm], options: Options, out: Path) -> Iterator[PlannedRun]:
    """All runs in the order in which they are made: every arm once for a seed, every second time in reverse order."""
    pairs = [(seed, number) for number in range(1, options.rounds + 1) for seed in options.seeds]
    for index, arm in interleaved(arms, len(pairs)):
        seed, number = pairs[index - 1]
        yield PlannedRun(arm, seed, number, out / f"{folder_name(arm.name)}-seed{seed}-r{number}")
