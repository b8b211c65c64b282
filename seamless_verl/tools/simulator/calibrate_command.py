"""The command `seamless-verl calibrate`: fits the simulator's constants to a run, from its metrics and its ledger."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from seamless_verl.cli.main import Commands, add_parser
from seamless_verl.cli.output import format_count, text_table, write, write_file
from seamless_verl.errors import ConfigError
from seamless_verl.runtime.files import DESCRIPTION, RunDescription
from seamless_verl.runtime.step_metrics import FILE as METRICS
from seamless_verl.tools.simulator.calibration import (
    LEAST_STEPS,
    RECORDING,
    Calibration,
    RatesSource,
    fit,
    read_metrics,
    read_rates,
)
from seamless_verl.tools.simulator.machine import TWO_CORES
from seamless_verl.tools.view.folder import DEPTH, JOURNALS, MAX_LISTED, TRACES, runs_below

FILES = (DESCRIPTION, RECORDING, TRACES, JOURNALS)  # of a run, beside its metrics
SHOWN = (
    ("train_token_s", "train", "device-seconds a trained token"),
    ("train_row_s", "train", "device-seconds a sequence"),
    ("host_s", "host_s", "seconds of the host's work on a mini-batch"),
    ("sync_s", "sync_s", "seconds of a weight update"),
    ("load_s", "load_s", "seconds for which an engine stops for it"),
    ("switch_to_train_s", "switch_to_train_s", "seconds of a hand-over to training"),
    ("switch_to_rollout_s", "switch_to_rollout_s", "seconds of a hand-over to generation"),
)


def add_command(commands: Commands) -> None:
    """Adds the command to the tree of subcommands."""
    calibrate = add_parser(commands, "calibrate")
    add = calibrate.add_argument
    place = "trainer.default_local_dir of a run, a file in it, or a folder above"
    add("run_folder", type=Path, metavar="RUN", help=place)
    add("--out", type=Path, metavar="FILE", help="where the constants go; calibration.json in RUN")
    add("--skip", type=int, default=2, help="first steps that are left out")
    add("--samples", type=int, help=f"the run's actor_rollout_ref.rollout.n, by default as {DESCRIPTION} says")
    add("--updates", type=int, help=f"the run's local updates of a step, by default as {DESCRIPTION} says")
    shared = "devices are the host's cores: assume its work as on two cores"
    add("--shared-cores", action="store_true", help=shared)
    calibrate.set_defaults(run=calibrate_run)


def calibrate_run(args: argparse.Namespace) -> None:
    """Raises ConfigError for a run that says too little, something that cannot be, or a file that cannot be written."""
    for key, least in (("skip", 0), ("samples", 1), ("updates", 1)):
        if (value := getattr(args, key)) is not None and value < least:
            raise ConfigError(f"--{key}", value, "it is too small", f"Give {least} or more")
    found_run = run_of(args.run_folder)
    folder = found_run if found_run.is_dir() else found_run.parent
    description = RunDescription.read(folder)
    samples, updates = args.samples, args.updates
    if description is not None:
        samples, updates = samples or description.samples, updates or description.updates
    if samples is None:
        reason = f"the run has no {DESCRIPTION} that says how many samples a prompt had"
        raise ConfigError("--samples", None, reason, "Give its actor_rollout_ref.rollout.n")
    run = read_metrics(found_run, skip=args.skip, least=LEAST_STEPS)
    found = fit(run, read_rates(folder), samples=samples, updates=updates or 1)
    if args.shared_cores:
        assumed = {name: getattr(TWO_CORES, name) for name in ("host_token_s", "host_sample_s", "dispatch_s", "call_s")}
        found = replace(found, machine=replace(found.machine, **assumed))
    out = args.out or folder / "calibration.json"
    write_file("--out", out, found.to_json() + "\n")
    write("\n".join((*calibration_lines(found), "", f"written to {out}")))


def run_of(given: Path) -> Path:
    """The run's folder, or its file of metrics: as given, around another file of the run, or the only one below.

    Raises ConfigError when there is none, or more than one.
    """
    beside = given.parent / METRICS
    if given.is_file():
        return given.parent if beside.is_file() and any(given.match(name) for name in FILES) else given
    found = [folder for folder in (given, *runs_below(given)) if (folder / METRICS).is_file()]
    if not found:
        reason = "there is no such file or folder"
        if given.is_dir():
            reason = f"neither it nor a folder up to {DEPTH} levels below it has a {METRICS}"
        way_out = "Give trainer.default_local_dir of a run of the seamless trainer, or verl's file logger's file"
        raise ConfigError("RUN", str(given), reason, way_out)
    if len(found) > 1 and found[0] != given:
        listed = ", ".join(map(str, found[:MAX_LISTED])) + (", ..." if len(found) > MAX_LISTED else "")
        raise ConfigError("RUN", str(given), f"{len(found)} runs are below it", f"Give one of them: {listed}")
    return found[0]


def calibration_lines(found: Calibration) -> Iterator[str]:
    """Lines for a terminal: each constant with its residual."""
    yield f"fitted to {format_count(found.steps, 'step')} after the first {found.skipped}, of {found.devices} devices"
    rows = [
        (name, f"{getattr(found.machine, name):.4g}", f"{found.residuals[of]:.0%}", what) for name, of, what in SHOWN
    ]
    spread, what = f"{found.residuals['rates']:.0%}", "tokens/s of an engine"
    if found.engine_source is RatesSource.MEAN:
        what += "; the mean of the run, beside it the spread of its steps"
    rows += [(f"rates {calls}", f"{rate:.4g}", spread, what) for calls, rate in found.machine.rates.items()]
    yield text_table(("CONSTANT", "VALUE", "RESIDUAL", ""), rows, align="<>><")
    yield f"engines: {found.engine_source}; not seen in a run, and assumed: {', '.join(found.assumed)}"
