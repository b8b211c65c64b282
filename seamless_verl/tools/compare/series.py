"""Makes the runs of a comparison one after the other, and keeps the report as far as it has come.

A run that fails is one outcome among others. A signal ends the run that is being made; what there is then is reported.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from seamless_verl.runtime.sample_lengths import FILE as LENGTHS
from seamless_verl.runtime.sample_lengths import RecordedLengths
from seamless_verl.tools.compare.arms import BUFFER, ComparedArm
from seamless_verl.tools.compare.budget import (
    differences,
    machines_of,
    permitted,
    select,
    step_size,
    steps_of,
    trainer_devices,
)
from seamless_verl.tools.compare.comparison import ArmFacts, Comparison, Run, RunState
from seamless_verl.tools.compare.equal_tokens import at_equal_tokens
from seamless_verl.tools.compare.figures import run_figures, step_figures
from seamless_verl.tools.compare.forced_work import ForcedWork, WorkedRun, forced_work, read_samples
from seamless_verl.tools.compare.job import Job, Options, PlannedRun, planned_runs, shared_overrides
from seamless_verl.tools.compare.lengths import length_bias
from seamless_verl.tools.compare.machine import (
    CoreUse,
    Read,
    UseSample,
    UseSampler,
    condition_lines,
    gpus,
    idle_between,
    nvml_use,
    span,
    surroundings,
)
from seamless_verl.tools.compare.probe import ProbedArm
from seamless_verl.tools.compare.report import run_line, terminal_table
from seamless_verl.tools.compare.running import LOG_FILE, METRICS_FILE, RunFailedError, Step, one_a_step, run_logged
from seamless_verl.tools.compare.store import DONE, StoredRun, fingerprint, read_run, write_report, write_run
from seamless_verl.tools.compare.workloads import SAMPLES_FILE


def facts_of(one: ProbedArm, runnable: Sequence[ComparedArm]) -> ArmFacts:
    """What is known of an arm before its runs; its baseline is the first of its learning rate that can run."""
    arm, config = one.arm, one.config
    return ArmFacts(
        baseline=next((other.name for other in runnable if other.rate == arm.rate), runnable[0].name),
        permitted=None if config is None else permitted(config, arm.mode),
        rate=arm.rate,
        system=arm.system or arm.name,
        line=arm.line or arm.name,
        shipped_poll=not arm.is_ours and config is not None and select(config, f"{BUFFER}.path") is None,
    )


def without_baseline(arms: Sequence[ProbedArm]) -> dict[str, str]:
    """A sentence for each arm that was to be a baseline and cannot run here: why, and what ratios are relative to.

    There is one baseline for each learning rate, the first of its arms.
    """
    found = dict[str, str]()
    for rate in dict.fromkeys(one.arm.rate for one in arms):
        first, *others = (one for one in arms if one.arm.rate == rate)
        if first.config is not None:
            continue
        able = [one.arm.name for one in others if one.config is not None]
        of = f" of the arms with learning rate {rate}" * bool(rate)
        relative = f"There are no ratios{of}: {f'only {able[0]}' if able else 'none'} can run here"
        if len(able) > 1:
            relative = f"The ratios{of} are relative to {able[0]} instead"
        found[first.arm.name] = f"{cannot_run(first)}. It was to be the baseline. {relative}."
    return found


def cannot_run(one: ProbedArm) -> str:
    return f"{one.arm.name} cannot run here: {one.reason.rstrip('.')}"


def by_arm(numbers: Mapping[str, int]) -> str:
    """One number, or where arms have different ones, each with its arms."""
    arms_of: dict[int, list[str]] = {}
    for arm, value in numbers.items():
        arms_of.setdefault(value, []).append(arm)
    if len(arms_of) == 1:
        return str(next(iter(arms_of)))
    return " or ".join(f"{value} ({', '.join(arms)})" for value, arms in arms_of.items())


def idle_unknown(configs: Sequence[Mapping[str, Any]], devices: int) -> str:
    """Why the devices of these arms cannot all be seen from here, as the end of a sentence; "" if they can.

    Idle time of some of them would pass for that of all. On the CPU platform a device is a core.
    """
    cards, local = gpus().get("gpus"), len(os.sched_getaffinity(0))
    if select(configs[0], "trainer.device") != "cpu":
        if (machines := max(map(machines_of, configs))) > 1:
            return f"they are on {machines} machines, and only this machine's can be seen"
        if cards is None:
            return "NVML cannot be used here"
        local = len(cards)
    return f"there are {devices}, and {local} on this machine, of which alone they can be seen" * (devices > local)


@dataclass
class RunSeries:
    """One comparison that is being made; `runs` grows, and every run of `planned` is in it at the end."""

    job: Job
    arms: Sequence[ProbedArm]
    options: Options
    devices: int
    out: Path
    command: str
    screen: TextIO = sys.stderr
    runs: list[Run] = field(default_factory=list)
    raw: dict[tuple[str, int, int], list[Step]] = field(default_factory=dict)
    surroundings: list[Mapping[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        runnable = [one.arm for one in self.arms if one.config is not None]
        self.planned = {one.key: one for one in planned_runs([one.arm for one in self.arms], self.options, self.out)}
        self.by_name = {one.arm.name: one for one in self.arms}
        self.facts = {one.arm.name: facts_of(one, runnable) for one in self.arms}
        self.configs = {one.arm.name: one.config for one in self.arms if one.config is not None}
        (self.baseline, self.config), *others = self.configs.items()
        self.differences = {arm: differences(config, self.config) for arm, config in others}
        self.fingerprints = {arm: fingerprint(config, self.job) for arm, config in self.configs.items()}
        self.sizes = {arm: step_size(config) for arm, config in self.configs.items()}
        self.steps = {arm: steps_of(config, self.options.steps) for arm, config in self.configs.items()}
        self.warnings = without_baseline(self.arms)
        self.idle_unknown = idle_unknown(list(self.configs.values()), self.devices)

    def make(self) -> None:
        """Make every run that is not made yet; after each, write the report and print the table."""
        for planned in self.planned.values():
            self.runs.append(self.run(planned))
            found = self.report()
            self.say(f"\n{run_line(self.runs[-1])}\n{terminal_table(found)}\n")

    def interrupt(self) -> None:
        """Account for the runs that were not made, and report the others."""
        made = {run.key for run in self.runs}
        self.runs += [Run(*key, RunState.NOT_MADE, reason="interrupted") for key in self.planned if key not in made]
        self.report(interrupted=True)

    def run(self, planned: PlannedRun) -> Run:
        """Make one run, or take what an earlier comparison in this folder made of the very same one."""
        probed = self.by_name[planned.arm.name]
        if probed.config is None:
            return Run(*planned.key, RunState.REFUSED, reason=probed.reason, log=probed.log)
        identity = {"command": self.command_of(planned), "fingerprint": self.fingerprints[planned.arm.name]}
        log, begun = str(planned.folder / LOG_FILE), time.time()
        try:
            made = read_run(planned.folder, identity) or self.start(planned, identity)
        except RunFailedError as error:
            self.surroundings.append(surroundings(begun))
            return Run(*planned.key, RunState.FAILED, reason=str(error), log=log)
        self.surroundings.append(made.surroundings)
        self.raw[planned.key] = one_a_step(made.steps)
        size, skip = self.sizes[planned.arm.name], self.options.skip
        steps = step_figures(made.steps, size, lambda began, ended: idle_between(made.use, began, ended))
        measured_from = next(step.at_s for step in steps if step.step == skip)
        lengths = RecordedLengths.read(planned.checkpoints / LENGTHS)
        return Run(
            *planned.key,
            RunState.FINISHED,
            tuple(steps),
            run_figures(steps, size, skip=skip, idle=idle_between(made.use, measured_from, steps[-1].at_s)),
            log=log,
            lengths=lengths,
            bias=None if lengths is None else length_bias(lengths),
            machine=made.surroundings.get("machine", {}),
        )

    def command_of(self, planned: PlannedRun) -> list[str]:
        shared = shared_overrides(self.options, planned.seed, planned.folder)
        return self.job.command([*shared, *self.by_name[planned.arm.name].overrides])

    def start(self, planned: PlannedRun, identity: Mapping[str, Any]) -> StoredRun:
        """Run the command, and keep what came of it."""
        folder, begun = planned.folder, time.time()
        folder.mkdir(parents=True, exist_ok=True)
        for file in (folder / DONE, folder / METRICS_FILE, planned.checkpoints / SAMPLES_FILE):
            file.unlink(missing_ok=True)
        watch: list[tuple[UseSampler, float]] = []

        def started(pid: int, began: float) -> None:
            if (use := self.device_use(pid)) is not None:
                watch.append((UseSampler(use), began))

        self.progress(planned, None)
        try:
            steps = run_logged(
                identity["command"],
                folder,
                self.job.environment(folder),
                steps=self.steps[planned.arm.name],
                timeout_s=self.options.timeout_s,
                on_start=started,
                on_step=lambda step: self.progress(planned, step),
            )
        finally:
            for sampler, _ in watch:
                sampler.close()
        seen = [UseSample(one.began - at, one.ended - at, one.shares) for use, at in watch for one in use.samples]
        made = StoredRun(steps, seen, surroundings(begun))
        write_run(folder, identity, made)
        return made

    def device_use(self, pid: int) -> Read | None:
        """What the run's devices do, seen from outside; None where it cannot be seen, as `idle_unknown` says."""
        if self.idle_unknown:
            return None
        if select(self.config, "trainer.device") == "cpu":
            return CoreUse(pid, sorted(os.sched_getaffinity(0))[: self.devices]).read
        return nvml_use(self.devices)

    def progress(self, planned: PlannedRun, step: Step | None) -> None:
        """On a terminal, one line that says where the run is."""
        if self.screen.isatty():
            steps = self.steps[planned.arm.name]
            at = "starts" if step is None else f"step {step['step']} of {steps}, {step['at']:.0f} s"
            number = f"run {len(self.runs) + 1} of {len(self.planned)}"
            self.say(f"\r\x1b[K{number}: {planned.arm.name}, seed {planned.seed}, round {planned.round}: {at}")

    def say(self, text: str) -> None:
        with suppress(OSError):  # a terminal that was closed, of which a signal tells
            self.screen.write(text)
            self.screen.flush()

    def report(self, *, interrupted: bool = False) -> Comparison:
        """Writes all files as far as the runs have come."""
        found = self.comparison(interrupted=interrupted)
        write_report(self.out, found, self.raw, self.manifest())
        return found

    def comparison(self, *, interrupted: bool = False) -> Comparison:
        equal = None
        if self.options.equal_tokens:
            groups = {arm: size.group for arm, size in self.sizes.items()}
            steps = {run.key: run.steps for run in self.runs if run.figures is not None}
            names = dict.fromkeys(run.arm for run in self.runs)
            equal = at_equal_tokens(steps, self.raw, groups, names, self.baseline)
        return Comparison(
            title=f"{self.job.name}: {', '.join(self.by_name)}",
            baseline=self.baseline,
            runs=tuple(self.runs),
            steps=min(self.steps.values()),
            skip=self.options.skip,
            conditions=tuple(self.conditions()),
            command=self.command,
            differences=self.differences,
            interrupted=interrupted,
            equal_tokens=equal,
            arms=self.facts,
            target_reward=self.options.target_reward,
            warnings=tuple(self.warnings.values()),
            idle_unknown=self.idle_unknown,
            forced_work=self.forced_work(),
        )

    def forced_work(self) -> ForcedWork | None:
        """What holds of a workload's runs alone."""
        if self.job.workload is None or not self.raw:
            return None
        found = []
        for key, logged in self.raw.items():
            config, planned = self.configs[key[0]], self.planned[key]
            again = bool(select(config, "seamless.tail_batching"))
            samples = read_samples(planned.checkpoints / SAMPLES_FILE, begins_again=again)
            found.append(WorkedRun(key[0], planned.folder.name, logged, samples, trainer_devices(config)))
        return forced_work(self.job.workload, found, self.job.rates, self.options.skip)

    def conditions(self) -> list[str]:
        """Lines about the budget, and about the machine, the versions and the time of the runs."""
        options, size = self.options, self.sizes[self.baseline]
        kind = "the CPU platform, a core each" if select(self.config, "trainer.device") == "cpu" else "accelerators"
        model = select(self.config, "actor_rollout_ref.model.path")
        seeds, steps = ", ".join(map(str, options.seeds)), by_arm(self.steps)
        samples = by_arm({arm: size.samples for arm, size in self.sizes.items()})
        return [
            f"{steps} steps of {samples} samples, {self.devices} device(s) ({kind}), seeds {seeds}, "
            f"{options.rounds} round(s); the first {options.skip} steps of a run are not measured.",
            f"The same in every arm: model {model}, prompts and their order by seed, {size.updates} optimizer steps a "
            f"step, {'' if options.equal_tokens else f'{size.group} samples a prompt, '}no checkpoints.",
            *(condition_lines(self.surroundings) if self.surroundings else ()),
        ]

    def manifest(self) -> dict[str, Any]:
        """All that it takes to run it again; surroundings are those of the last run."""
        last = self.surroundings[-1] if self.surroundings else surroundings(time.time())
        began, ended = span(self.surroundings) if self.surroundings else (None, None)
        entries = []
        for run in self.runs:
            planned = self.planned[run.key]
            entries.append(
                {
                    "arm": run.arm,
                    "written": planned.arm.text,
                    "seed": run.seed,
                    "round": run.round,
                    "state": str(run.state),
                    "reason": run.reason,
                    "log": run.log,
                    "command": self.command_of(planned),
                    "environment": self.job.own_environment(planned.folder),
                }
            )
        return {
            "command": self.command,
            "folder": str(Path.cwd()),
            "options": vars(self.options),
            "baseline": self.baseline,
            "devices": self.devices,
            **last,
            "began": began,
            "ended": ended,
            "runs": entries,
        }
