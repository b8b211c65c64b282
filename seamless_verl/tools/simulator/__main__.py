"""The command `python -m seamless_verl.tools.simulator`: simulates scenarios and prints their results."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import get_type_hints

import msgspec

from seamless_verl.algorithms.samplers import SAMPLERS, sampler_named
from seamless_verl.errors import ConfigError
from seamless_verl.resources.lending import POLICIES
from seamless_verl.runtime.fields import read_value
from seamless_verl.tools.simulator.machine import MACHINES, MachineProfile, machine_named
from seamless_verl.tools.simulator.report import calibration_table, results_table, results_to_json
from seamless_verl.tools.simulator.scenario import SCHEDULERS, Deaths, Scenario, Scheduler
from seamless_verl.tools.simulator.simulate import simulate
from seamless_verl.tools.simulator.workload import WORKLOADS, workload_named

PROG, AUTO = "python -m seamless_verl.tools.simulator", "auto"
FLAGS = {  # and the fields of Scheduler that they set
    "--drop": ("drop", "give old groups up instead of waiting for them"),
    "--prefetch": ("prefetch", "the host prepares a mini-batch while devices compute"),
    "--early-pause": ("early_pause", "pause engines for the host's work too"),
    "--keep": ("keep_cache", "what engines have computed is kept over a weight update"),
}
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
    parser.add_argument("--workload", default="w2", help=f"one of {', '.join(WORKLOADS)}")
    parser.add_argument(
        "--devices",
        nargs="+",
        default=["train+rollout"] * 2,
        metavar="TAGS",
        help="a device's tags, joined by +; 512*train+rollout are so many devices",
    )
    parser.add_argument(
        "--scheduler", nargs="+", default=["seamless"], help=f"one or more of {', '.join(SCHEDULERS)}; each is a line"
    )
    parser.add_argument("--policy", nargs="+", help=f"for each scheduler, one line for each of {', '.join(POLICIES)}")
    parser.add_argument("--max-staleness", type=int, help="weight versions")
    parser.add_argument(
        "--ahead",
        type=ahead,
        metavar="STEPS",
        help="batches submitted beyond the current one; auto: found as a run does",
    )
    parser.add_argument(
        "--updates",
        type=int,
        help="local updates of a step (verl's parameter_sync_step), a mini-batch of its prompts each",
    )
    parser.add_argument("--machine", default="devices", help=f"one of {', '.join(MACHINES)}")
    parser.add_argument("--switch-s", type=float, help="seconds of a switch, each way")
    parser.add_argument("--tail-batching", type=float, metavar="SHARE", help="of extra prompts of a step")
    parser.add_argument("--host-s", type=float, help="seconds of the host's work on a mini-batch")
    for flag, (field, text) in FLAGS.items():
        parser.add_argument(flag, dest=field, action="store_true", default=None, help=text)
    parser.add_argument("--look-s", type=float, help="seconds between two decisions of the policy while training waits")
    parser.add_argument("--deaths-per-hour", type=float, default=0.0, help="of replicas, in the whole cluster")
    parser.add_argument("--restart-s", type=float, default=60.0, help="seconds until a dead replica is back")
    death = "the replica of this device, counted from 0, dies then, and is back after --restart-s"
    parser.add_argument("--death", nargs="+", type=death_of, default=[], metavar="SECONDS:DEVICE", help=death)
    parser.add_argument("--seats", type=int, default=32, help="calls an engine runs at once")
    parser.add_argument("--sampler", help=f"who is sampled and how often: one of {', '.join(SAMPLERS)}")
    parser.add_argument(
        "--sampler-option",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="an option of seamless.sampler that it reads",
    )
    parser.add_argument(
        "--pass-rates", nargs="+", type=float, default=SPREAD, metavar="P", help="of the data's prompts, for a sampler"
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--calibration", action="store_true", help="measured against simulated, and nothing else")
    return parser


def _simulate_all(args: argparse.Namespace) -> str:
    results = {name: simulate(scenario) for name, scenario in scenarios(args).items()}
    return results_to_json(results) if args.json else results_table(results)


def scenarios(args: argparse.Namespace) -> dict[str, Scenario]:
    """The scenarios by the name of their line. Raises ConfigError for a name or number that cannot be."""
    named: dict[str, Scenario] = {}
    for name in args.scheduler:
        for policy in args.policy or [None]:
            scheduler = _scheduler(args, name, policy)
            line = f"{name} {policy}" if policy else name
            named[line] = Scenario(
                replace(workload_named(args.workload), pass_rates=tuple(args.pass_rates)),
                tuple(device for text in args.devices for device in _devices(text)),
                scheduler,
                _machine(args),
                seats=args.seats,
                steps=args.steps,
                seed=args.seed,
                deaths=Deaths(args.deaths_per_hour, args.restart_s, tuple(args.death)),
                sampler=args.sampler,
                sampler_options=_sampler_options(args.sampler, args.sampler_option),
            )
    return named


def _devices(text: str) -> tuple[frozenset[str], ...]:
    number, star, tags = text.rpartition("*")
    if star and not (number.isdecimal() and int(number)):
        raise ConfigError("devices", text, "no number of devices is before the *", "Give one of 1 or more")
    return (frozenset(tags.split("+")),) * (int(number) if star else 1)


def ahead(text: str) -> float | str:
    """A number, or AUTO; ValueError for another text."""
    return AUTO if text == AUTO else float(text)


def death_of(text: str) -> tuple[float, int]:
    """Reads SECONDS:DEVICE; ValueError for another text."""
    seconds, _, device = text.partition(":")
    return float(seconds), int(device)


death_of.__name__ = "SECONDS:DEVICE"  # as argparse names it where the text is none


def _sampler_options(sampler: str | None, given: Sequence[str]) -> dict[str, object]:
    """The options of that sampler by name. Raises ConfigError for one that it does not read, and for a bad value."""
    options: dict[str, object] = {}
    for text in given:
        name, _, value = text.partition("=")
        kind = None if sampler is None else sampler_named(sampler)
        if kind is None or name not in kind.OPTIONS:
            way_out = f"Give {' or '.join(kind.OPTIONS)}" if kind else "Give --sampler"
            raise ConfigError("--sampler-option", text, f"is not read by sampler {sampler}", way_out)
        wanted = get_type_hints(kind.__init__)[name]
        options[name] = read_value(wanted, value_of(value), key=f"--sampler-option {name}")
    return options


def value_of(text: str) -> object:
    """A number where the text is one."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _scheduler(args: argparse.Namespace, name: str, policy: str | None) -> Scheduler:
    if name not in SCHEDULERS:
        way_out = f"Choose one of {sorted(SCHEDULERS)}"
        raise ConfigError("scheduler", name, "there is no such scheduler", way_out)
    given = vars(args) | {"policy": policy}
    if args.ahead == AUTO:
        given |= {"ahead": None, "finds_ahead": True}
    names = {field.name for field in fields(Scheduler)}
    return replace(SCHEDULERS[name], **{k: value for k, value in given.items() if k in names and value is not None})


def _machine(args: argparse.Namespace) -> MachineProfile:
    overrides = {"switch_to_rollout_s": args.switch_s, "switch_to_train_s": args.switch_s, "host_s": args.host_s}
    return replace(machine_named(args.machine), **{key: value for key, value in overrides.items() if value is not None})


if __name__ == "__main__":
    sys.exit(main())
