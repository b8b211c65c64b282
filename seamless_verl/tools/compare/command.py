"""The command `seamless-verl compare`: verl's trainers and ours on one job, interleaved, with a report."""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from seamless_verl.cli.main import COMMANDS, OVERRIDE
from seamless_verl.cli.output import write
from seamless_verl.config.words import misread_of
from seamless_verl.errors import ConfigError
from seamless_verl.tools.compare.arms import DEFAULT_ARMS, ComparedArm, parse_arms, repeated, with_short_poll
from seamless_verl.tools.compare.comparison import RunState
from seamless_verl.tools.compare.engine_baseline import with_data
from seamless_verl.tools.compare.job import SKIP, STEPS, TIMEOUT_S, Job, Options, check_arms, job_named
from seamless_verl.tools.compare.probe import probe_arms, probe_job
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
    add("--timeout", dest="timeout_s", type=float, default=TIMEOUT_S, metavar="SECONDS", help="of one run")
    parser.set_defaults(run=compare)


def compare(args: argparse.Namespace) -> int:
    """Raises ConfigError for settings that cannot work, before anything runs, and for a disk that is full meanwhile."""
    for name in PARTS:
        if importlib.util.find_spec(name) is None:
            raise ConfigError("compare", name, "is not installed, and makes the report", f"pip install {name}")
    target, overrides = split_job(args.job)
    options = options_of(args)
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


def options_of(args: argparse.Namespace) -> Options:
    """What the command line has, lists parsed."""
    lists = {
        "seeds": parse_seeds(args.seeds),
        "bounds": parse_bounds(args.staleness) if args.staleness else (),
        "rates": parse_rates(args.learning_rates) if args.learning_rates else (),
    }
    return Options(**{name: getattr(args, name) for name in Options.__dataclass_fields__ if name not in lists} | lists)


def prepared(job: Job, arms: Sequence[ComparedArm] | None, options: Options, out: Path) -> RunSeries:
    """The comparison, with each arm checked; ConfigError when there is nothing to compare."""
    sys.stderr.write(f"checking the job {job.name}: its settings, after what its recipe makes, if it is one\n")
    wanted = arms or default_arms()
    check_arms(wanted, options)
    job = with_data(job, options)
    facts = probe_job(job, options, out, splits=any(arm.mode == "separate_async" for arm in wanted))
    if arms is None and facts.machines.total <= 1:
        sys.stderr.write("separate_async is left out: it needs two devices, and there is one\n")
        wanted = [arm for arm in wanted if arm.mode != "separate_async"]
    if options.short_poll:
        wanted = [with_short_poll(arm) for arm in wanted]
    probed = probe_arms(job, repeated(wanted, options.bounds, options.rates), facts, options, out, sys.stderr.write)
    command = shlex.join(["seamless-verl", *sys.argv[1:]])  # to be given again
    series = RunSeries(job, probed, options, facts.machines.total, out, command)
    sys.stderr.write("".join(f"{line}\n" for line in unable_lines(series)))
    return series


def unable_lines(series: RunSeries) -> list[str]:
    """A line for each arm that cannot run here, which is a warning where it was to be a baseline."""
    lost = {one.arm.name: cannot_run(one) for one in series.arms if one.config is None}
    return [f"warning: {series.warnings[arm]}" if arm in series.warnings else line for arm, line in lost.items()]


def default_arms() -> list[ComparedArm]:
    return parse_arms(",".join(DEFAULT_ARMS))


def make(series: RunSeries) -> int:
    """Make the runs; the exit code. After a signal, what there is is reported."""
    code = 0
    try:
        series.make()
    except SystemExit as end:
        series.interrupt()
        code = int(end.code or 0)
    found = series.comparison()
    if code != 128 + signal.SIGHUP:  # then the terminal is closed
        place = f"The report is in {series.out / 'report.html'}, and as text beside it."
        write(f"{ending(found)}\n{place}")
    unequal = found.forced_work is not None and bool(found.forced_work.unequal)
    return code or int(unequal or any(run.state is not RunState.FINISHED for run in series.runs))


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


def parse_list(
    option: str, text: str, number: Callable[[str], float], reason: str, example: str, *, once: bool = True
) -> tuple[str, ...]:
    """What stands between commas; ConfigError where `number` raises ValueError for a part, or one comes twice."""
    parts = tuple(text.split(","))
    try:
        numbers = {number(part) for part in parts}
    except ValueError as error:
        raise ConfigError(option, text, reason, f"Write them as {option} {example}") from error
    if once and len(numbers) < len(parts):
        raise ConfigError(option, text, "names one twice", f"Write them as {option} {example}")
    return parts


def whole(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(text)
    return int(text)


def rate(text: str) -> float:
    if not 0 < float(text) < 1:
        raise ValueError(text)
    return float(text)


def parse_seeds(text: str) -> tuple[int, ...]:
    """Whole numbers; whether one comes twice is `Options.check`'s."""
    return tuple(map(int, parse_list("--seeds", text, whole, "are not numbers", "1,2,3", once=False)))


def parse_bounds(text: str) -> tuple[int, ...]:
    reason = "are not whole numbers of 0 or more between commas"
    return tuple(map(int, parse_list("--staleness", text, whole, reason, "0,1,4")))


def parse_rates(text: str) -> tuple[str, ...]:
    """As they were written, by which arms are named."""
    return parse_list("--learning-rates", text, rate, "are not numbers between 0 and 1", "5e-4,1e-3")
