"""Looks at the job and at each arm before any run: is it refused here, which devices has it, is its budget the same?"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seamless_verl.errors import ConfigError, shorten
from seamless_verl.tools.compare.arms import RATE, ComparedArm, JobFacts, arm_overrides, folder_name
from seamless_verl.tools.compare.budget import STEPS, VALIDATE, budget_of, check_same_budget, facts_of, select, steps_of
from seamless_verl.tools.compare.figures import LAST
from seamless_verl.tools.compare.job import Job
from seamless_verl.tools.compare.machine import gpus
from seamless_verl.tools.compare.plan import Options, shared_overrides
from seamless_verl.tools.compare.running import managed_process

FOLDER, RESULT_FILE, LOG_FILE = "probes", "config.json", "log.txt"
PROBE_S = 900.0  # a recipe makes its model and its data first
REASON_CHARS = 1500


@dataclass(frozen=True)
class Probed:
    """A composed config that its run would not be refused for, and the devices of the CPU platform here."""

    config: Mapping[str, Any]
    cores: int | None


@dataclass(frozen=True)
class ProbedArm:
    """An arm with its overrides; `reason` says why it cannot run here, `config` is there if it can."""

    arm: ComparedArm
    overrides: tuple[str, ...]
    config: Mapping[str, Any] | None
    reason: str = ""
    log: str = ""


def probe(job: Job, overrides: Sequence[str], folder: Path) -> Probed:
    """Compose and check a config in a process of its own.

    Raises:
        ConfigError: the run would be refused, or what the recipe does before it failed or took too long.
    """
    folder.mkdir(parents=True, exist_ok=True)
    result, log = folder / RESULT_FILE, folder / LOG_FILE
    result.unlink(missing_ok=True)
    command, env = job.probe(overrides), job.probe_environment(folder, result)
    with log.open("wb") as file:
        options: dict[str, Any] = {"stdout": file, "stderr": subprocess.STDOUT, "start_new_session": True}
        with managed_process(command, group=True, env=env, **options) as process:
            try:
                code = process.wait(PROBE_S)
            except subprocess.TimeoutExpired as error:
                end = shorten(log.read_text(errors="replace"), REASON_CHARS)
                reason = f"its check took longer than {PROBE_S:g} s, with what a recipe makes before it. Its log: {end}"
                raise ConfigError("settings", job.name, reason, f"See {log}") from error
    if code != 0 or not result.is_file():
        text = log.read_text(errors="replace").strip()
        raise ConfigError("settings", job.name, shorten(text, REASON_CHARS), f"See {log}")
    found = json.loads(result.read_text())
    return Probed(found["config"], found["cores"])


def probe_job(job: Job, options: Options, out: Path, *, splits: bool) -> tuple[JobFacts, Probed]:
    """The job as it was given, and what the arms' overrides follow from; ConfigError when it cannot run here."""
    folder = out / FOLDER / "job"
    found = probe(job, shared_overrides(options, options.seeds[0], folder), folder)
    cards = len(gpus().get("gpus", ())) or None
    return facts_of(found.config, devices=options.devices, on_machine=found.cores, splits=splits, gpus=cards), found


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
        found.append(probe_arm(job, arm, facts, options, out / FOLDER))
    runnable = [(one.arm.name, one.config) for one in found if one.config is not None]
    budgets = {name: budget_of(config, equal_tokens=options.equal_tokens) for name, config in runnable}
    check_enough(found)
    check_steps(runnable, options)
    rates_differ = any(arm.rate for arm in arms)
    check_same_budget({name: without_rate(budget) if rates_differ else budget for name, budget in budgets.items()})
    return found


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


def check_steps(arms: Sequence[tuple[str, Mapping[str, Any]]], options: Options) -> None:
    """ConfigError for an arm with steps of its own of which none is measured, or too few are validated."""
    for name, config in arms:
        steps = steps_of(config, options.steps)
        if steps <= options.skip:
            reason = f"in arm {name} leaves nothing to measure after the first {options.skip}"
            raise ConfigError(STEPS, steps, reason, f"Give it {options.skip + 1} or more, or a smaller --skip")
        every = int(select(config, VALIDATE) or 0)
        if options.equal_tokens and not 1 <= every <= steps // LAST:
            reason = f"in arm {name}, with {steps} steps, makes fewer than {LAST} validations"
            way_out = f"Give it 1 to {steps // LAST}" if steps >= LAST else f"Give {STEPS}={LAST} or more"
            raise ConfigError(VALIDATE, every, reason, way_out)


def without_rate(budget: Mapping[str, Any]) -> dict[str, Any]:
    """The budget where arms were asked for at several learning rates."""
    return {key: value for key, value in budget.items() if key != RATE}


def recording(arm: ComparedArm) -> list[str]:
    """Ours writes down its samples' lengths; of verl's modes nobody outside knows what they drew and did not train."""
    return ["++seamless.record=true"] if arm.is_ours else []


def probe_arm(job: Job, arm: ComparedArm, facts: JobFacts, options: Options, folder: Path) -> ProbedArm:
    place = folder / folder_name(arm.name)
    try:
        overrides = [*recording(arm), *arm_overrides(arm, facts)]
    except ConfigError as error:
        return ProbedArm(arm, (), None, str(error))
    try:
        found = probe(job, [*shared_overrides(options, options.seeds[0], place), *overrides], place)
    except ConfigError as error:
        return ProbedArm(arm, tuple(overrides), None, error.reason, str(place / LOG_FILE))
    return ProbedArm(arm, tuple(overrides), found.config)
