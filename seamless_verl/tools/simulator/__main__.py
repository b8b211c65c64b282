"""The command `python -m seamless_verl.tools.simulator`: simulates scenarios and prints their results."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, get_type_hints

import msgspec

from seamless_verl.algorithms.samplers import SAMPLERS, sampler_named
from seamless_verl.errors import ConfigError
from seamless_verl.resources.lending import POLICIES
from seamless_verl.runtime.fields import read_value
from seamless_verl.tools.simulator.machine import MACHINES, named
from seamless_verl.tools.simulator.report import calibration_table, results_table, results_to_json
from seamless_verl.tools.simulator.scenario import SCHEDULERS, WORKLOADS, Scenario, Scheduler
from seamless_verl.tools.simulator.simulate import simulate

PROG, AUTO = "python -m seamless_verl.tools.simulator", "auto"
SPREAD = tuple(i / 8 for i in range(9))  # pass rates from prompts that always fail to prompts that never do


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code, which is 2 for a name or number that cannot be."""
    args = make_parser().parse_args(argv)
    try:
        text = calibration_table() if args.calibration else _simulate_all(args)
    except ConfigError as error:
        sys.stderr.write(f"{PROG}: {error}\n")
        return 2
    sys.stdout.write(f"{text}\n")
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROG, description="Schedulers and lending policies in virtual time.")
    add = parser.add_argument
    add("--workload", default="w2", help=f"one of {', '.join(WORKLOADS)}")
    tags = "a device's tags, joined by +; 512*train+rollout are so many devices"
    add("--devices", nargs="+", default=["train+rollout"] * 2, metavar="TAGS", help=tags)
    schedulers = f"one or more of {', '.join(SCHEDULERS)}; each is a line"
    add("--scheduler", nargs="+", default=["seamless"], help=schedulers)
    add("--policy", nargs="+", help=f"for each scheduler, one line for each of {', '.join(POLICIES)}")
    add("--max-staleness", type=int, help="weight versions")
    steps = "batches submitted beyond the current one; auto: found as a run does"
    add("--ahead", type=ahead, metavar="STEPS", help=steps)
    add("--updates", type=int, help="local updates of a step (verl's parameter_sync_step), a mini-batch each")
    add("--machine", default="devices", help=f"one of {', '.join(MACHINES)}")
    add("--tail-batching", type=float, metavar="SHARE", help="of extra prompts of a step")
    add("--shares-prompts", action="store_true", default=None, help="training computes a group's prompt once")
    keep = "what engines have computed is kept over a weight update"
    add("--keep", dest="keep_cache", action="store_true", default=None, help=keep)
    add("--look-s", type=float, help="seconds between two decisions of the policy while training waits")
    add("--seats", type=int, default=32, help="calls an engine runs at once")
    add("--sampler", help=f"who is sampled and how often: one of {', '.join(SAMPLERS)}")
    option = "an option of seamless.sampler that it reads"
    add("--sampler-option", nargs="+", default=[], metavar="KEY=VALUE", help=option)
    rates = "of the data's prompts, for a sampler"
    add("--pass-rates", nargs="+", type=float, default=SPREAD, metavar="P", help=rates)
    add("--steps", type=int, default=40)
    add("--seed", type=int, default=1)
    add("--json", action="store_true")
    add("--calibration", action="store_true", help="measured against simulated, and nothing else")
    return parser


def _simulate_all(args: argparse.Namespace) -> str:
    results = {name: simulate(scenario) for name, scenario in scenarios(args).items()}
    return results_to_json(results) if args.json else results_table(results)


def scenarios(args: argparse.Namespace) -> dict[str, Scenario]:
    """The scenarios by the name of their line. Raises ConfigError for a name or number that cannot be."""
    times = {"shares_prompts": args.shares_prompts}
    one = Scenario(
        replace(named(WORKLOADS, args.workload, "workload"), pass_rates=tuple(args.pass_rates)),
        tuple(device for text in args.devices for device in _devices(text)),
        machine=replace(named(MACHINES, args.machine, "machine"), **_given(times)),
        seats=args.seats,
        steps=args.steps,
        seed=args.seed,
        sampler=args.sampler,
        sampler_options=_sampler_options(args.sampler, args.sampler_option),
    )
    fields_of = {field.name for field in fields(Scheduler)} - {"policy"}
    options = {name: value for name, value in vars(args).items() if name in fields_of}
    if args.ahead == AUTO:
        options |= {"ahead": None, "finds_ahead": True}
    return {
        f"{name} {policy}" if policy else name: replace(
            one, scheduler=replace(named(SCHEDULERS, name, "scheduler"), **_given({**options, "policy": policy}))
        )
        for name in args.scheduler
        for policy in args.policy or [None]
    }


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _devices(text: str) -> tuple[frozenset[str], ...]:
    number, star, tags = text.rpartition("*")
    if star and not (number.isdecimal() and int(number)):
        raise ConfigError("devices", text, "no number of devices is before the *", "Give one of 1 or more")
    return (frozenset(tags.split("+")),) * (int(number) if star else 1)


def ahead(text: str) -> float | str:
    """A number, or AUTO; ValueError for another text."""
    return AUTO if text == AUTO else float(text)


def _sampler_options(sampler: str | None, given: Sequence[str]) -> dict[str, object]:
    """The options of that sampler by name. Raises ConfigError for one that it does not read, and for a bad value."""
    options: dict[str, object] = {}
    for text in given:
        name, _, value = text.partition("=")
        kind = None if sampler is None else sampler_named(sampler)
        if kind is None or name not in kind.OPTIONS:
            way_out = f"Give {' or '.join(kind.OPTIONS)}" if kind else "Give --sampler"
            raise ConfigError("--sampler-option", text, f"is not read by sampler {sampler}", way_out)
        try:
            number: object = msgspec.json.decode(value)
        except msgspec.DecodeError:
            number = value
        options[name] = read_value(get_type_hints(kind.__init__)[name], number, key=f"--sampler-option {name}")
    return options


if __name__ == "__main__":
    sys.exit(main())
