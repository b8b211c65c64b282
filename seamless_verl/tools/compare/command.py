"""The command `seamless-verl compare`: verl's trainers and ours on one job, interleaved, with a report."""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from seamless_verl.cli.main import COMMANDS, OVERRIDE
from seamless_verl.cli.output import write
from seamless_verl.config.words import misread_of
from seamless_verl.errors import ConfigError
from seamless_verl.tools.compare.arms import DEFAULT_ARMS, ComparedArm, JobFacts, parse_arms, repeated, with_short_poll
from seamless_verl.tools.compare.job import Job, job_named, with_data
from seamless_verl.tools.compare.outcome import RunState
from seamless_verl.tools.compare.plan import SKIP, STEPS, Options, check_arms
from seamless_verl.tools.compare.probing import probe_arms, probe_job
from seamless_verl.tools.compare.report import ending
from seamless_verl.tools.compare.running import exit_on_signals
from seamless_verl.tools.compare.series import RunSeries, cannot_run
from seamless_verl.tools.compare.store import output_folder
from seamless_verl.tools.compare.workloads import WORKLOADS

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
DESCRIPTION = f"""Runs the same job with several trainers, one run after the other, and reports how fast they are, how
much of their devices' time is idle, how stale their tokens are, and whether they learn alike.

The job is a recipe (its name or its folder), a config file on seamless_ppo_trainer (.yaml), KEY=VALUE alone, or a
workload whose responses have forced lengths ({", ".join(WORKLOADS)}). More KEY=VALUE hold in every arm. A run that is
finished in the output folder is not made again. Exit code 0; 1 when an arm did not finish, or did other work; 2 for a
setting that cannot work; 130 after Ctrl-C, 143 after SIGTERM, 129 when the terminal is closed, with a report of what
there is."""
ARMS_HELP = (
    "separated by commas, the first is the baseline: sync, colocate_async, separate_async (verl's), seamless (ours), "
    "each with settings as in seamless:max_staleness=4, or ours by another name as in "
    f"far:max_staleness=4; by default {','.join(DEFAULT_ARMS)}, the second one where there are two devices"
)
NAME = "compare"
FLAGS = ("--equal-tokens", "--short-poll", "--bound")  # its options that take no value
PARTS = ("plotly", "pyarrow", "jinja2")


def add_command(commands: Commands) -> None:
    """Adds the command to the tree of subcommands."""
    parser = commands.add_parser(
        NAME, help=COMMANDS[NAME], description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("job", nargs="*", metavar="CONFIG|RECIPE KEY=VALUE", help="what is compared")
    add = parser.add_argument
    add("--arms", help=ARMS_HELP)
    add("--staleness", metavar="S,...", help="run each arm of ours with each max_staleness, as in 0,1,4")
    add("--learning-rates", metavar="R,...", help="run each arm with each of them, beside a baseline of its own")
    add("--seeds", default="1,2", help="of the data's order; 1,2 by default")
    add("--rounds", type=int, default=1, help="how often each seed is run; 1 by default")
    add("--steps", type=int, default=STEPS, help=f"of each run; {STEPS} by default")
    add("--skip", type=int, default=SKIP, help=f"first steps that are not measured; {SKIP} by default")
    validate = "validate every N steps; by default the reward is training's"
    add("--validate", type=int, default=0, metavar="N", help=validate)
    equal = "compare after as many generated tokens, too; arms may differ in sampler, estimator, rollout.n and steps"
    add("--equal-tokens", action="store_true", help=equal)
    target = "report the seconds to it; by default to the reward that the baseline has at the end"
    add("--target-reward", type=float, metavar="REWARD", help=target)
    poll = "verl's modes look for finished prompts every 0.1 s, and not as shipped every 2.0 s"
    add("--short-poll", action="store_true", help=poll)
    add("--bound", action="store_true", help="of a workload: measure an engine alone, and report the bubble-free bound")
    add("--devices", type=int, metavar="N", help="of every arm, by default as many as the job has")
    add("--out", type=Path, help="folder of the report; runs/compare/<job> by default")
    add("--timeout", type=float, default=3600.0, metavar="SECONDS", help="of one run")
    parser.set_defaults(run=compare)


def compare(args: argparse.Namespace) -> int:
    """Raises ConfigError for settings that cannot work, before anything runs, and for a disk that is full meanwhile."""
    needs_parts()
    target, overrides = split_job(args.job)
    options = Options(
        args.steps,
        args.skip,
        parse_seeds(args.seeds),
        args.rounds,
        args.validate,
        args.devices,
        args.timeout,
        args.equal_tokens,
        args.target_reward,
        tuple(parse_bounds(args.staleness)) if args.staleness else (),
        tuple(parse_rates(args.learning_rates)) if args.learning_rates else (),
        args.short_poll,
        args.bound,
    )
    options.check()
    arms = parse_arms(args.arms) if args.arms else None
    repeated(arms or default_arms(), options.bounds, options.rates)
    out = (args.out or Path("runs/compare") / job_named(target, overrides, Path()).name).absolute()
    job = job_named(target, overrides, out)
    try:
        with output_folder(out):
            exit_on_signals()
            series = prepared(job, arms, options, out)
    except SystemExit as end:  # a signal before anything ran
        return int(end.code or 0)
    with output_folder(out):  # it may fill up
        return make(series)


def prepared(job: Job, arms: Sequence[ComparedArm] | None, options: Options, out: Path) -> RunSeries:
    """The comparison, with each arm checked; ConfigError when there is nothing to compare."""
    sys.stderr.write(f"checking the job {job.name}: its settings, after what its recipe makes, if it is one\n")
    wanted = arms or default_arms()
    check_arms(wanted, options)
    job = with_data(job, options.steps, validate=options.validate, bound=options.bound, timeout_s=options.timeout_s)
    splits = any(arm.mode == "separate_async" for arm in wanted)
    facts, _ = probe_job(job, options, out, splits=splits)
    chosen = [arm for arm in wanted if arms or fits(arm, facts)]
    if options.short_poll:
        chosen = [with_short_poll(arm) for arm in chosen]
    probed = probe_arms(job, repeated(chosen, options.bounds, options.rates), facts, options, out, sys.stderr.write)
    series = RunSeries(job, probed, options, facts.machines.total, out, command_line())
    sys.stderr.write("".join(f"{line}\n" for line in unable_lines(series)))
    return series


def unable_lines(series: RunSeries) -> Iterator[str]:
    """A line for each arm that cannot run here, which is a warning where it was to be a baseline."""
    for one in series.arms:
        if one.config is None:
            warning = series.warnings.get(one.arm.name)
            yield cannot_run(one) if warning is None else f"warning: {warning}"


def default_arms() -> list[ComparedArm]:
    return parse_arms(",".join(DEFAULT_ARMS))


def fits(arm: ComparedArm, facts: JobFacts) -> bool:
    """Whether there are devices for an arm that nobody asked for by name."""
    if arm.mode != "separate_async" or facts.machines.total > 1:
        return True
    sys.stderr.write("separate_async is left out: it needs two devices, and there is one\n")
    return False


def make(series: RunSeries) -> int:
    """Make the runs; the exit code. After a signal, what there is is reported."""
    try:
        series.make()
    except SystemExit as end:
        series.interrupt()
        if end.code != 128 + signal.SIGHUP:  # then the terminal is closed
            say_ending(series)
        return int(end.code or 0)
    say_ending(series)
    work = series.forced_work()
    unequal = work is not None and bool(work.unequal)
    return int(unequal or any(run.state is not RunState.FINISHED for run in series.runs))


def say_ending(series: RunSeries) -> None:
    place = f"The report is in {series.out / 'report.html'}, and as text beside it."
    write(f"{ending(series.comparison())}\n{place}")


def needs_parts() -> None:
    """ConfigError where a library of the report is not installed."""
    for name in PARTS:
        if importlib.util.find_spec(name) is None:
            raise ConfigError("compare", name, "is not installed, and makes the report", f"pip install {name}")


def split_job(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The config or recipe, if there is one, and the overrides; ConfigError for a word that is neither."""
    target, overrides = (words[0], list(words[1:])) if words and "=" not in words[0] else (None, list(words))
    if target is None and not overrides:
        raise ConfigError("CONFIG|RECIPE", None, "there is nothing to compare", "Give one, as in arithmetic_grpo")
    for word in overrides:
        if OVERRIDE.match(word) is None:
            raise misread_of(word, overrides) or ConfigError(
                "KEY=VALUE", word, "is no setting", "Write it as key=value"
            )
    return target, overrides


def parse_seeds(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise ConfigError("--seeds", text, "are not numbers", "Write them as --seeds 1,2,3")
    return tuple(map(int, text.split(",")))


def parse_bounds(text: str) -> list[int]:
    """Whole numbers between commas; ConfigError for anything else."""
    parts = text.split(",")
    way_out = "Write them as --staleness 0,1,4"
    if not all(part.isdecimal() for part in parts):
        raise ConfigError("--staleness", text, "are not whole numbers of 0 or more between commas", way_out)
    bounds = [int(part) for part in parts]
    if len(set(bounds)) < len(bounds):
        raise ConfigError("--staleness", text, "names one twice", way_out)
    return bounds


def parse_rates(text: str) -> list[str]:
    """Numbers above 0 between commas, as they were written; ConfigError for anything else."""
    parts = text.split(",")
    try:
        values = {float(part) for part in parts}
    except ValueError:
        values = {0.0}
    way_out = "Write them as --learning-rates 5e-4,1e-3"
    if not all(0 < value < 1 for value in values):
        raise ConfigError("--learning-rates", text, "are not numbers between 0 and 1", way_out)
    if len(values) < len(parts):
        raise ConfigError("--learning-rates", text, "names one twice", way_out)
    return parts


def command_line() -> str:
    """This command, to be given again."""
    return shlex.join(["seamless-verl", *sys.argv[1:]])
