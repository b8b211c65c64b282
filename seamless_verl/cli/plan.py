"""`seamless-verl plan`: where everything of a run would be, and what it would need, without starting anything."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from seamless_verl.cli.text import columns, counted, write
from seamless_verl.errors import ConfigError
from seamless_verl.resources.memory_fit import gigabytes
from seamless_verl.resources.placement import PlannedDevice
from seamless_verl.resources.plan import Plan, plan_to_json

if TYPE_CHECKING:
    from omegaconf import DictConfig

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
PLATFORM = "SEAMLESS_PLATFORM"
HEADER = ("MACHINE", "GROUP", "DEVICES", "TAGS", "TRAINER", "REPLICAS", "ROLES", "PEAK", "IN PHASE")
ABOUT = "where everything of a run would be, and what it would need, without starting anything"


def add(commands: Commands) -> None:
    plan = commands.add_parser("plan", help=ABOUT, description=ABOUT[0].upper() + ABOUT[1:] + ".")
    plan.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as for seamless_verl.main_ppo")
    plan.add_argument("--json", action="store_true", help="the plan as JSON")
    plan.add_argument("--config-dir", type=Path, metavar="FOLDER", help="of a config of your own; needs --config-name")
    plan.add_argument("--config-name", metavar="NAME", default="seamless_ppo_trainer")
    plan.set_defaults(run=show_plan)


def show_plan(args: argparse.Namespace) -> None:
    """Raises ConfigError for settings that have no plan; what else a run would be refused for is said beside it."""
    from seamless_verl.config import SeamlessConfig
    from seamless_verl.config.adopting import adopt_resources
    from seamless_verl.config.checks import Settings, preflight_of_plan
    from seamless_verl.config.planning import plan_of

    config = composed(args.config_dir, args.config_name, args.overrides)
    cpu = config.trainer.device == "cpu"
    devices = SeamlessConfig.parse(config.get("seamless")).cpu.device_count if cpu else None
    adopt_resources(config, args.overrides)
    settings = Settings.of(config, devices=devices, accelerator=not cpu)
    warnings, plan = preflight_of_plan(settings), plan_of(replace(settings, unmade=True))
    for warning in warnings:
        sys.stderr.write(f"warning: {warning}\n")
    write(plan_to_json(plan) if args.json else "\n".join(table(plan)))


def composed(folder: Path | None, name: str, overrides: Sequence[str]) -> DictConfig:
    """The config that a run would have; ConfigError for what hydra cannot compose."""
    from hydra import compose, initialize_config_dir

    from seamless_verl.config import register_search_path
    from seamless_verl.config.composing import HERE, composing
    from seamless_verl.platform.detect import on_cpu

    register_search_path()
    place = HERE if folder is None else folder
    if not place.is_dir():
        raise ConfigError("--config-dir", str(place), "there is no such folder", "Give the folder of your config")
    here = "cpu" if on_cpu() else "accelerator"
    with composing(overrides), chosen_platform(here), initialize_config_dir(str(place.absolute()), version_base=None):
        return compose(name, list(overrides))


@contextmanager
def chosen_platform(name: str) -> Iterator[None]:
    """What config/platform our config takes when its user names none, for the length of the block."""
    named = PLATFORM in os.environ
    os.environ.setdefault(PLATFORM, name)
    try:
        yield
    finally:
        if not named:
            del os.environ[PLATFORM]


def table(plan: Plan) -> Iterator[str]:
    """Lines for a terminal: what the layout is, a line for each machine, and what verl's fields become."""
    trainer = plan.trainer
    machines = len({device.node for device in plan.devices})
    yield f"{plan.layout.value}: {counted(machines, 'machine')}, {counted(len(plan.devices), 'device')}"
    axes = f"DP {trainer.data} x TP {trainer.tensor} x PP {trainer.pipeline} x CP {trainer.context}"
    yield f"trainer: {counted(len(trainer.devices), 'rank')} = {axes}, EP {trainer.expert}"
    sizes = {len(replica.devices) for replica in plan.replicas}
    kinds = [replica.kind.value for replica in plan.replicas]
    by_kind = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    yield f"replicas: {by_kind}, of {counted(min(sizes), 'device')} each"
    if plan.parameters is not None:
        has = "unknown" if plan.device_bytes is None else gigabytes(plan.device_bytes)
        shared = ", shared by all devices" if plan.shared_memory else " a device"
        yield f"model: {plan.parameters:,} parameters; memory: {has}{shared}"
    else:
        yield "memory: not estimated; that takes actor_rollout_ref.model.path here, all of it trained by Megatron"
    yield ""
    yield from columns([HEADER, *(_machine(plan, node) for node in range(machines))], right=())
    yield ""
    yield "verl's fields: " + " ".join(f"{key}={value}" for key, value in plan.fields)


def _machine(plan: Plan, node: int) -> tuple[str, ...]:
    devices = [device for device in plan.devices if device.node == node]
    numbers = {device.number for device in devices}
    ranks = [rank for rank, number in enumerate(plan.trainer.devices) if number in numbers]
    replicas = [f"{r.rank}{r.kind.value[0]}" for r in plan.replicas if numbers & set(r.devices)]
    roles = [place.tag for place in plan.places if numbers & set(place.devices)]
    return (
        str(node),
        devices[0].group,
        spans([device.number for device in devices]),
        "+".join(devices[0].tags),
        spans(ranks),
        " ".join(replicas) or "-",
        " ".join(roles) or "-",
        *_peak(plan, devices),
    )


def _peak(plan: Plan, devices: Sequence[PlannedDevice]) -> tuple[str, str]:
    numbers = {device.number for device in devices}
    peaks = [peak for peak in plan.memory if peak.device in numbers and peak.parts]
    if not peaks:
        return "-", "-"
    most = max(peaks, key=lambda peak: peak.peak.certain)
    more = f" +{gigabytes(most.may_add)}" if most.may_add else ""
    return f"{gigabytes(most.peak.certain)}{more}", most.phase


def spans(numbers: Sequence[int]) -> str:
    """Ascending numbers as 0-3,6; a dash for none."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs) or "-"
