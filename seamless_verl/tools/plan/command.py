"""The command `seamless-verl plan`: a run's placement and memory needs, without starting anything."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from seamless_verl.cli.main import OPTIMIZE, Commands, add_parser
from seamless_verl.cli.output import format_count, text_table, write
from seamless_verl.errors import ConfigError, refuse
from seamless_verl.resources.memory_fit import gigabytes, sizes
from seamless_verl.resources.plan import Plan, plan_to_json

if TYPE_CHECKING:
    from omegaconf import DictConfig

FLAGS = ("--json", "--optimize")  # its options that take no value
OPTION = "--platform"
PLATFORM_VARIABLE = "SEAMLESS_PLATFORM"
HEADER = ("MACHINE", "GROUP", "DEVICES", "TAGS", "TRAINER", "REPLICAS", "ROLES", "PEAK", "IN PHASE")


def add_command(commands: Commands) -> None:
    """Adds the command to the tree of subcommands."""
    plan = add_parser(commands, "plan")
    plan.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as for seamless_verl.main_ppo")
    plan.add_argument("--json", action="store_true", help="the plan as JSON")
    plan.add_argument("--config-dir", type=Path, metavar="FOLDER", help="of a config of your own; needs --config-name")
    plan.add_argument("--config-name", metavar="NAME", default="seamless_ppo_trainer")
    plan.add_argument(OPTION, metavar="NAME", help="accelerator or cpu, as platform=NAME; what this machine has")
    plan.add_argument("--optimize", action="store_true", help="search layouts, sizes and staleness by simulation")
    of_search = [
        plan.add_argument("--machines", metavar="COUNTxDEVICES", help="4x8; without it those of the config"),
        plan.add_argument("--calibration", type=Path, metavar="FILE", help="times of `seamless-verl calibrate`"),
        plan.add_argument("--device", metavar="NAME", help="published times instead: a100, h100, h200 or h800"),
        plan.add_argument("--median", type=int, metavar="TOKENS", help="of a turn's length; a quarter of the longest"),
        plan.add_argument("--sigma", type=float, default=0.8, help="of the logarithm of a turn's length"),
        plan.add_argument("--turns", type=int, default=1, help="calls of a session"),
        plan.add_argument("--tool-s", type=float, default=0.0, help="mean seconds of a tool between two calls"),
        plan.add_argument("--tool-tokens", type=int, default=0, help="of a tool's result"),
        plan.add_argument("--prompt-tokens", type=int, metavar="TOKENS", help="of a prompt; half of the longest"),
        plan.add_argument("--steps", type=int, default=12, help="of each simulated run"),
        plan.add_argument("--top", type=int, default=5, help="plans to print"),
    ]
    plan.set_defaults(run=show_plan, search=of_search)


def show_plan(args: argparse.Namespace) -> None:
    """Raises ConfigError for settings that have no plan; other reasons to refuse a run are printed as warnings."""
    if not args.optimize:
        refuse(_read_by_the_search_alone(args))
    from seamless_verl.config import SeamlessConfig
    from seamless_verl.config.adopting import adopt
    from seamless_verl.config.checks import Settings, preflight_of_plan
    from seamless_verl.config.planning import choose_handover, plan_of
    from seamless_verl.platform.detect import on_cpu
    from seamless_verl.tools.plan.run_lines import export_line, routes_line, shared_prefixes_line

    config = compose_config(args.config_dir, args.config_name, args.overrides, args.platform)
    cpu = config.trainer.device == "cpu"
    devices = SeamlessConfig.parse(config.get("seamless")).cpu.device_count if cpu else None
    correction = adopt(config, args.overrides)
    settings = Settings.of(config, devices=devices, accelerator=not cpu)
    if args.optimize:
        write(import_module(OPTIMIZE).optimize(args, settings))
        return
    unmade = replace(settings, unmade=True)
    warnings, plan = preflight_of_plan(settings, elsewhere=not cpu and on_cpu()), plan_of(unmade)
    for warning in warnings:
        sys.stderr.write(f"warning: {warning}\n")
    chosen = str(choose_handover(unmade)) if settings.mode == "seamless" else ""
    lines = [
        *plan_lines(plan, [export_line(unmade), routes_line(unmade), shared_prefixes_line(unmade), chosen]),
        *([] if correction is None else [correction]),
    ]
    write(plan_to_json(plan) if args.json else "\n".join(lines))


def _read_by_the_search_alone(args: argparse.Namespace) -> list[ConfigError]:
    """A mistake for each argument of the search that was given."""
    reason, way_out = "is read by the search alone", "Add --optimize to search, or leave it out"
    return [
        ConfigError(option.option_strings[0], str(value), reason, way_out)
        for option in args.search
        if (value := getattr(args, option.dest)) != option.default
    ]


def compose_config(folder: Path | None, name: str, overrides: Sequence[str], platform: str | None = None) -> DictConfig:
    """The config that a run would have; raises ConfigError if hydra cannot compose it.

    `platform` is what `--platform` names; None leaves it to SEAMLESS_PLATFORM, or to what this machine has.
    """
    from hydra import compose, initialize_config_dir

    from seamless_verl.config import register_search_path
    from seamless_verl.config.composing import HERE, composing, named_platform
    from seamless_verl.platform.detect import usual_platform

    register_search_path()
    config_dir = HERE if folder is None else folder
    if not config_dir.is_dir():
        raise ConfigError("--config-dir", str(config_dir), "there is no such folder", "Give the folder of your config")
    usual = os.environ.get(PLATFORM_VARIABLE) or usual_platform()
    chosen = usual if platform is None else named_platform(OPTION, platform)
    path = str(config_dir.absolute())
    with composing(overrides), default_platform(chosen), initialize_config_dir(path, version_base=None):
        return compose(name, list(overrides))


@contextmanager
def default_platform(name: str) -> Iterator[None]:
    """In the block, config/platform is `name` if no override names another."""
    before = os.environ.get(PLATFORM_VARIABLE)
    os.environ[PLATFORM_VARIABLE] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ[PLATFORM_VARIABLE]
        else:
            os.environ[PLATFORM_VARIABLE] = before


def plan_lines(plan: Plan, facts: Sequence[str] = ()) -> Iterator[str]:
    """Lines for a terminal: the layout, a row per machine, and the resulting values of verl's fields.

    `facts` are lines of the run, such as how weights leave the trainer; empty ones are left out.
    """
    trainer = plan.trainer
    machines = len({device.node for device in plan.devices})
    yield f"{plan.layout.value}: {format_count(machines, 'machine')}, {format_count(len(plan.devices), 'device')}"
    axes = f"DP {trainer.data} x TP {trainer.tensor} x PP {trainer.pipeline} x CP {trainer.context}"
    yield f"trainer: {format_count(len(trainer.devices), 'rank')} = {axes}, EP {trainer.expert}"
    counts = {len(replica.devices) for replica in plan.replicas}
    kinds = [replica.kind.value for replica in plan.replicas]
    by_kind = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    yield f"replicas: {by_kind}, of {format_count(min(counts), 'device')} each"
    if plan.parameters is not None:
        has = "unknown" if plan.device_bytes is None else gigabytes(plan.device_bytes)
        shared = ", shared by all devices" if plan.shared_memory else " a device"
        yield f"model: {plan.parameters:,} parameters; memory: {has}{shared}"
        if not plan.shared_memory:
            most, host = max(plan.hosts, key=lambda needs: needs.size), plan.host_bytes
            of = "" if host is None else f" of {gigabytes(host)}"
            yield f"host memory: up to {gigabytes(most.size)}{of} a machine ({sizes(most.parts)})"
    else:
        yield "memory: not estimated; that takes actor_rollout_ref.model.path here, all of it trained by Megatron"
    yield from filter(None, facts)
    yield ""
    yield text_table(HEADER, [_machine_row(plan, node) for node in range(machines)])
    yield ""
    yield "verl's fields: " + " ".join(f"{key}={value}" for key, value in plan.fields)


def _machine_row(plan: Plan, node: int) -> tuple[str, ...]:
    devices = [device for device in plan.devices if device.node == node]
    numbers = {device.number for device in devices}
    ranks = [rank for rank, number in enumerate(plan.trainer.devices) if number in numbers]
    replicas = [f"{r.rank}{r.kind.value[0]}" for r in plan.replicas if numbers & set(r.devices)]
    roles = [place.tag for place in plan.places if numbers & set(place.devices)]
    peak, phase = "-", "-"
    if peaks := [peak for peak in plan.memory if peak.device in numbers and peak.parts]:
        most = max(peaks, key=lambda peak: peak.peak.certain)
        peak, phase = gigabytes(most.peak.certain), most.phase
        peak += f" +{gigabytes(most.may_add)}" if most.may_add else ""
    return (
        str(node),
        devices[0].group,
        format_ranges(numbers),
        "+".join(devices[0].tags),
        format_ranges(ranks),
        " ".join(replicas) or "-",
        " ".join(roles) or "-",
        peak,
        phase,
    )


def format_ranges(numbers: Iterable[int]) -> str:
    """The numbers in ascending order as 0-3,6; a dash if there are none."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs) or "-"
