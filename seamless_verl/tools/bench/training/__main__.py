"""The command `python -m seamless_verl.tools.bench.training --workload w2 --arms sync,seamless --rounds 3 --steps 12`.

Whole jobs run one after the other, every arm once in each round, so that a drift of the machine affects all alike.
Each run has a folder `OUT/<workload>/<arm>-r<round>`; one that is finished there is not run again.
A device is a core, to which its engine and its trainer are pinned. What else a job runs (queues, agent loops, the
engines' front ends) shares the two cores, unpinned. Ray gives all of them one niceness, and each has one thread.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seamless_verl.errors import ConfigError, exits_on_config_error
from seamless_verl.tiny.files import replaced_file
from seamless_verl.tools.bench.training.arms import Arm, arms_named, default_arms
from seamless_verl.tools.bench.training.engine_baseline import with_tool_time
from seamless_verl.tools.bench.training.figures import figures
from seamless_verl.tools.bench.training.report import RESULT_FILE, make_report, report_text, write_result
from seamless_verl.tools.bench.training.running import run
from seamless_verl.tools.bench.training.settings import BenchPlan, bench_cores, make_data
from seamless_verl.tools.bench.training.workloads import WORKLOADS, Workload, workload_named
from seamless_verl.tools.compare.arms import interleaved
from seamless_verl.tools.compare.figures import check_skip
from seamless_verl.tools.compare.machine import differ, identity, machine
from seamless_verl.tools.compare.processes import RunFailedError, exit_on_signals

VANILLA = "sync,colocate_async,separate_async,separate_async-switch,*-poll"
OURS = "seamless-default,seamless-colocated-s1,seamless-disaggregated-s1-streamed,seamless-multiplexed-s1-streamed"
LONGEST_TURN_S = 60.0
MEASURED = "measured"
MACHINE = "machine"  # in the file of a folder's settings


@exits_on_config_error
def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0; 1 when a run failed or did other work; 2 for a setting that cannot work."""
    options = make_parser().parse_args(arguments)
    workload = workload_named(options.workload)
    if options.list:
        sys.stdout.write("".join(f"{arm.name}\n" for arm in default_arms(workload)))
        return 0
    check(workload, options)
    return bench(workload, arms_named(workload, options.arms.split(",")), options)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m seamless_verl.tools.bench.training",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workload", default="w2", help=f"{', '.join(WORKLOADS)}; w2 by default")
    parser.add_argument("--arms", default=f"{VANILLA},{OURS}", help="names or patterns, or all; see --list")
    parser.add_argument("--list", action="store_true", help="print the names of the arms of `--arms all`")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="of each run")
    parser.add_argument("--skip", type=int, default=3, help="first steps that are not measured")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override in every arm")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one run, or for the engine alone")
    parser.add_argument(
        "--no-rates",
        action="store_true",
        help="do without the bound, for which an engine runs alone; for w3 it does unless --turn-s is given",
    )
    turn_s = (
        "seconds a tool of w3 takes on the mean; without it what a turn takes of an engine alone, which is measured"
    )
    parser.add_argument("--turn-s", type=float, metavar="SECONDS", help=turn_s)
    return parser


def check(workload: Workload, options: argparse.Namespace) -> None:
    """ConfigError for settings that cannot work, before anything is written."""
    if options.rounds < 1:
        raise ConfigError("--rounds", options.rounds, "makes no run", "Give --rounds 1 or more")
    check_skip(options.skip, options.steps)
    parse_set(options.set)
    if options.turn_s is None:
        return
    if workload.tool is None:
        raise ConfigError("--turn-s", options.turn_s, f"{workload.name} has no tools", "Leave it out")
    if not 0 < options.turn_s < LONGEST_TURN_S:
        reason = "is no time that a turn takes"
        raise ConfigError("--turn-s", options.turn_s, reason, f"Give more than 0, and less than {LONGEST_TURN_S:g}")


def bench(workload: Workload, arms: Sequence[Arm], options: argparse.Namespace) -> int:
    """Run the runs that are missing, then write `report.json` and `report.txt`, and print the latter."""
    bench_cores()
    extra = parse_set(options.set)
    folder = Path(options.out).absolute() / workload.name
    shared = {"steps": options.steps, "skip": options.skip, "set": extra}
    keep_settings(folder, shared | ({} if workload.tool is None else {"turn_s": options.turn_s or MEASURED}))
    data = folder / "data"
    if not (data / "val.parquet").exists():
        make_data(workload, options.steps, data)
    bound, model = not options.no_rates, data / "model"
    workload = with_tool_time(
        workload, options.turn_s, bound=bound, model=model, folder=folder, timeout_s=options.timeout
    )
    failed = 0
    for number, arm in interleaved(arms, options.rounds):
        plan = BenchPlan(workload, arm, options.steps, data, folder / f"{arm.name}-r{number}", extra)
        failed += not run_once(plan, number, skip=options.skip, timeout_s=options.timeout)
    report = make_report(workload, options.steps, folder)
    if report is None:
        return 1
    text = report_text(report)
    with replaced_file(folder / "report.json") as temporary:
        temporary.write_text(json.dumps(report.as_json(), indent=1))
    with replaced_file(folder / "report.txt") as temporary:
        temporary.write_text(text)
    sys.stdout.write(text)
    return int(failed > 0 or bool(report.unequal))


def parse_set(texts: Sequence[str]) -> dict[str, str]:
    for text in texts:
        if "=" not in text:
            raise ConfigError("--set", text, "has no value", "Write it as --set key=value")
    return dict(text.split("=", 1) for text in texts)


def keep_settings(folder: Path, settings: dict[str, object]) -> None:
    """Refuse other settings, or another machine, than those of the runs in the folder, since its runs are compared.

    Of a folder that does not say on which machine its runs were made nothing is refused for that.
    """
    file, here = folder / "settings.json", identity(machine())
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else dict(settings)
    there = found.pop(MACHINE, {})
    if found != settings:
        raise ConfigError("--out", str(folder), f"holds runs with {found}", "Give those settings, or another --out")
    if differ(there, here):
        reason = f"holds runs of another machine, {there}, and this one is {here}"
        raise ConfigError("--out", str(folder), reason, "Give another --out")
    with replaced_file(file) as temporary:
        temporary.write_text(json.dumps(settings | {MACHINE: there or here}))


def run_once(plan: BenchPlan, number: int, *, skip: int, timeout_s: float) -> bool:
    """Make a run unless it is finished; whether it is finished now."""
    name = f"{plan.workload.name} {plan.arm.name} round {number}"
    if (plan.folder / RESULT_FILE).exists():
        return True
    for file in plan.folder.glob("*.jsonl"):  # of a run that was interrupted
        file.unlink()
    try:
        steps = run(plan, timeout_s)
    except RunFailedError as error:
        sys.stderr.write(f"{name} failed: {error}\n")
        return False
    found = figures(plan.workload, steps, skip=skip, trains=plan.arm.trains)
    write_result(plan.folder, plan.arm.name, number, found)
    sys.stderr.write(f"{name}: {found.tokens_per_s:.0f} tokens/s, {found.step_s:.2f} s a step\n")
    return True


if __name__ == "__main__":
    exit_on_signals()
    sys.exit(main())
