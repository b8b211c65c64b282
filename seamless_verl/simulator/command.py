"""The command line: which scenarios to run, from names and numbers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

from seamless_verl.errors import ConfigError
from seamless_verl.resources.lending import POLICIES
from seamless_verl.simulator.report import as_json, as_table, calibration_table
from seamless_verl.simulator.scenario import (
    MACHINES,
    SCHEDULERS,
    WORKLOADS,
    MachineProfile,
    Scenario,
    Scheduler,
    machine,
    workload,
)
from seamless_verl.simulator.simulate import simulate

PROG = "python -m seamless_verl.simulator"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what was asked for; returns the exit code, 2 for a mistake of the user's."""
    args = parser().parse_args(argv)
    try:
        sys.stdout.write((calibration_table() if args.calibration else _compared(args)) + "\n")
    except ConfigError as error:
        sys.stderr.write(f"{PROG}: {error}\n")
        return 2
    return 0


def parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(prog=PROG, description="Schedulers and lending policies in virtual time.")
    whole.add_argument("--workload", default="w2", help=f"one of {', '.join(WORKLOADS)}")
    whole.add_argument(
        "--devices", nargs="+", default=["train+rollout"] * 2, metavar="TAGS", help="a device's tags, joined by +"
    )
    whole.add_argument(
        "--scheduler", nargs="+", default=["seamless"], help=f"one or more of {', '.join(SCHEDULERS)}; each is a line"
    )
    whole.add_argument("--policy", nargs="+", help=f"for each scheduler, one line for each of {', '.join(POLICIES)}")
    whole.add_argument("--max-staleness", type=int, help="weight versions")
    whole.add_argument("--ahead", type=float, help="batches submitted beyond the current one")
    whole.add_argument("--updates", type=int, help="mini-batches of a step")
    whole.add_argument("--machine", default="devices", help=f"one of {', '.join(MACHINES)}")
    whole.add_argument("--switch-s", type=float, help="seconds of a switch, each way")
    whole.add_argument("--drop", action="store_true", help="give old groups up instead of waiting for them")
    whole.add_argument("--prefetch", action="store_true", help="the host prepares a mini-batch while devices compute")
    whole.add_argument("--early-pause", action="store_true", help="pause engines for the host's work too")
    whole.add_argument("--host-s", type=float, help="seconds of the host's work on a mini-batch")
    whole.add_argument("--seats", type=int, default=32, help="calls an engine runs at once")
    whole.add_argument("--steps", type=int, default=40)
    whole.add_argument("--seed", type=int, default=1)
    whole.add_argument("--json", action="store_true")
    whole.add_argument("--calibration", action="store_true", help="measured against simulated, and nothing else")
    return whole


def _compared(args: argparse.Namespace) -> str:
    results = {name: simulate(scenario) for name, scenario in scenarios(args).items()}
    return as_json(results) if args.json else as_table(results)


def scenarios(args: argparse.Namespace) -> dict[str, Scenario]:
    """By the name of the line. Raises ConfigError for a name or number that cannot be."""
    found = {}
    for name in args.scheduler:
        for policy in args.policy or [None]:
            scheduler = _scheduler(args, name, policy)
            line = f"{name} {policy}" if policy else name
            found[line] = Scenario(
                workload(args.workload),
                tuple(frozenset(tags.split("+")) for tags in args.devices),
                scheduler,
                _machine(args),
                seats=args.seats,
                steps=args.steps,
                seed=args.seed,
            )
    return found


def _scheduler(args: argparse.Namespace, name: str, policy: str | None) -> Scheduler:
    if name not in SCHEDULERS:
        way_out = f"Choose one of {sorted(SCHEDULERS)}"
        raise ConfigError("scheduler", name, "there is no such scheduler", way_out)
    given = {"policy": policy, "max_staleness": args.max_staleness, "ahead": args.ahead, "updates": args.updates}
    given |= {"drop": args.drop or None, "prefetch": args.prefetch or None, "early_pause": args.early_pause or None}
    return replace(SCHEDULERS[name], **{key: value for key, value in given.items() if value is not None})


def _machine(args: argparse.Namespace) -> MachineProfile:
    given = {"switch_to_rollout_s": args.switch_s, "switch_to_train_s": args.switch_s, "host_s": args.host_s}
    return replace(machine(args.machine), **{key: value for key, value in given.items() if value is not None})
