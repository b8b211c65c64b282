"""Looks at the job and at each arm before any run: is it refused here, which devices has it, is its budget the same?

Each is checked in a process of its own, `python -m seamless_verl.tools.compare.probe KEY=VALUE ...`, in the place of
its run: it takes what main_ppo takes, starts nothing, and ends with code 2 and the reason when the run would be
refused. It writes JSON to the file that `SEAMLESS_PROBE` names: {"config": the resolved config, "cores": devices of
the CPU platform here}.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from seamless_verl.config import SeamlessConfig
from seamless_verl.config.settings import resolved_tree
from seamless_verl.errors import ConfigError, exits_on_config_error, shorten
from seamless_verl.main_ppo import check, compose_and_run, run_folder
from seamless_verl.tools.compare.arms import RATE, ComparedArm, JobFacts, arm_overrides, folder_name
from seamless_verl.tools.compare.budget import STEPS, VALIDATE, budget_of, check_same_budget, facts_of, select, steps_of
from seamless_verl.tools.compare.figures import LAST
from seamless_verl.tools.compare.job import RESULT, Job, Options, shared_overrides
from seamless_verl.tools.compare.machine import gpus
from seamless_verl.tools.compare.running import LOG_FILE, managed_process

FOLDER, RESULT_FILE = "probes", "config.json"
PROBE_S = 900.0  # a recipe makes its model and its data first
REASON_CHARS = 1500
INTERRUPTED = 130


@dataclass(frozen=True)
class ProbedArm:
    """An arm with its overrides; `reason` says why it cannot run here, `config` is there if it can."""

    arm: ComparedArm
    overrides: tuple[str, ...]
    config: Mapping[str, Any] | None
    reason: str = ""
    log: str = ""


def probe(job: Job, overrides: Sequence[str], folder: Path) -> dict[str, Any]:
    """What the process of a check wrote.

    Raises:
        ConfigError: the run would be refused, or what the recipe does before it failed or took too long.
    """
    folder.mkdir(parents=True, exist_ok=True)
    result, log = folder / RESULT_FILE, folder / LOG_FILE
    result.unlink(missing_ok=True)
    command, env = job.probe(overrides, folder, result)
    with log.open("wb") as file, managed_process(command, file, env) as process:
        try:
            code = process.wait(PROBE_S)
        except subprocess.TimeoutExpired as error:
            end = shorten(log.read_text(errors="replace"), REASON_CHARS)
            reason = f"its check took longer than {PROBE_S:g} s, with what a recipe makes before it. Its log: {end}"
            raise ConfigError("settings", job.name, reason, f"See {log}") from error
    if code != 0 or not result.is_file():
        text = log.read_text(errors="replace").strip()
        raise ConfigError("settings", job.name, shorten(text, REASON_CHARS), f"See {log}")
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def probe_job(job: Job, options: Options, out: Path, *, splits: bool) -> JobFacts:
    """What the arms' overrides follow from, by the job as it was given; ConfigError when it cannot run here."""
    folder = out / FOLDER / "job"
    found = probe(job, shared_overrides(options, options.seeds[0], folder), folder)
    cards, cores = len(gpus().get("gpus", ())) or None, found["cores"]
    return facts_of(found["config"], devices=options.devices, on_machine=cores, splits=splits, gpus=cards)


def probe_arms(
    job: Job,
    arms: Sequence[ComparedArm],
    facts: JobFacts,
    options: Options,
    out: Path,
    say: Callable[[str], object] = lambda text: None,
) -> list[ProbedArm]:
    """Each arm as its run would be, or why it cannot run here; `say` gets a line before each.

    Raises:
        ConfigError: arms that can run have different budgets, or too few can.
    """
    found = []
    for number, arm in enumerate(arms, 1):
        say(f"checking arm {number} of {len(arms)}: {arm.name}\n")
        found.append(probe_arm(job, arm, facts, options, out / FOLDER / folder_name(arm.name)))
    check_enough(found)
    runnable = {one.arm.name: one.config for one in found if one.config is not None}
    check_steps(runnable, options)
    budgets = {name: budget_of(config, equal_tokens=options.equal_tokens) for name, config in runnable.items()}
    if any(arm.rate for arm in arms):
        for budget in budgets.values():
            budget.pop(RATE)
    check_same_budget(budgets)
    return found


def probe_arm(job: Job, arm: ComparedArm, facts: JobFacts, options: Options, folder: Path) -> ProbedArm:
    try:
        overrides = arm_overrides(arm, facts)
    except ConfigError as error:
        return ProbedArm(arm, (), None, str(error))
    try:
        found = probe(job, [*shared_overrides(options, options.seeds[0], folder), *overrides], folder)
    except ConfigError as error:
        return ProbedArm(arm, tuple(overrides), None, error.reason, str(folder / LOG_FILE))
    return ProbedArm(arm, tuple(overrides), found["config"])


def check_enough(arms: Sequence[ProbedArm]) -> None:
    """ConfigError unless two arms can run here, or the only one that was asked for."""
    names, able = [one.arm.name for one in arms], [one.arm for one in arms if one.config is not None]
    if not able:
        raise ConfigError("--arms", names, f"none can run here: {arms[0].reason}", "See above")
    if len(able) == 1 < len(arms):
        why = "; ".join(f"{one.arm.name}: {one.reason.rstrip('.')}" for one in arms if one.config is None)
        reason = f"only {able[0].name} can run here, which leaves nothing to compare it with. {why}"
        way_out = f"Give two arms that can run here, or this one alone: --arms {able[0].text}"
        raise ConfigError("--arms", names, reason, way_out)


def check_steps(arms: Mapping[str, Mapping[str, Any]], options: Options) -> None:
    """ConfigError for an arm with steps of its own of which none is measured, or too few are validated."""
    for name, config in arms.items():
        steps = steps_of(config, options.steps)
        if steps <= options.skip:
            reason = f"in arm {name} leaves nothing to measure after the first {options.skip}"
            raise ConfigError(STEPS, steps, reason, f"Give it {options.skip + 1} or more, or a smaller --skip")
        every = int(select(config, VALIDATE) or 0)
        if options.equal_tokens and not 1 <= every <= steps // LAST:
            reason = f"in arm {name}, with {steps} steps, makes fewer than {LAST} validations"
            way_out = f"Give it 1 to {steps // LAST}" if steps >= LAST else f"Give {STEPS}={LAST} or more"
            raise ConfigError(VALIDATE, every, reason, way_out)


def write_config(config: DictConfig) -> None:
    """ConfigError when the run would be refused."""
    check(config)
    devices = SeamlessConfig.parse(config.get("seamless")).cpu.device_count
    found = {"config": resolved_tree(config), "cores": devices if config.trainer.device == "cpu" else None}
    Path(os.environ[RESULT]).write_text(json.dumps(found, default=str))
    if (folder := run_folder()) is not None:
        shutil.rmtree(folder)  # hydra's, of a run that does not begin


@exits_on_config_error
def main() -> int:
    """Exit code 0, or 2 with a message on standard error."""
    compose_and_run(write_config)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda number, frame: sys.exit(INTERRUPTED))
    sys.exit(main())
