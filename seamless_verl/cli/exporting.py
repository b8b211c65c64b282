"""`trajectories export`: what would be trained of each closed session."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from seamless_verl.cli.reading import newest_version, opened, parsed_policy, rebuilt
from seamless_verl.cli.showing import account_line
from seamless_verl.cli.tables import Row, write_datasets, write_parquet
from seamless_verl.cli.text import counted, write
from seamless_verl.errors import ConfigError
from seamless_verl.trajectory.account import Account
from seamless_verl.trajectory.assemble import assemble
from seamless_verl.trajectory.export import rows, write_jsonl
from seamless_verl.trajectory.journal import JournalReader, Stage
from seamless_verl.trajectory.policies import Policy

BESIDE = ("", "-wal", "-shm", "-lock")  # a journal is all of these files


@dataclass
class Exported:
    """What went through, counted while the rows are written."""

    sessions: int = 0
    open: int = 0
    account: Account = field(default_factory=Account)


def export_sessions(args: argparse.Namespace) -> None:
    """Raises ConfigError for a policy, file or package that is not there, and where nothing can be written."""
    policy, reader = parsed_policy(args.policy), opened(args.journal)
    _check_place(args.out, args.journal, folder=args.format == "datasets")
    done = Exported()
    entries = _entries(reader, policy, args.version, args.uid, done)
    try:
        count = FORMATS[args.format](args.out, entries)
    except OSError as error:
        way_out = "Give a place that can be written, or free the disk"
        raise ConfigError("--out", str(args.out), str(error.strerror or error), way_out) from error
    left = f", {counted(done.open, 'open session')} left out" if done.open else ""
    write(f"{counted(count, 'row')} of {counted(done.sessions, 'session')} in {args.out}{left}")
    write(account_line(done.account))


def _check_place(out: Path, journal: Path, *, folder: bool) -> None:
    if out.resolve() in [Path(f"{journal.resolve()}{end}") for end in BESIDE]:
        raise ConfigError("--out", str(out), "it is the journal itself", "Give a file of its own")
    if not out.parent.is_dir():
        raise ConfigError("--out", str(out), f"there is no folder {out.parent}", "Make the folder first")
    if folder and out.exists():
        raise ConfigError("--out", str(out), "it exists, and a folder is not replaced", "Remove it, or give a new name")
    if not folder and out.is_dir():
        raise ConfigError("--out", str(out), "it is a folder", "Give a file, or --format datasets and a new folder")


def _entries(
    reader: JournalReader, policy: Policy, version: int | None, uid: str | None, done: Exported
) -> Iterator[Row]:
    for known in reader.sessions():
        if uid not in (None, known.uid):
            continue
        if known.stage is Stage.OPEN:
            done.open += 1
            continue
        recorded = reader.read(known.session_id)
        if recorded is None:
            continue  # it was handed over, and the run has deleted it meanwhile
        session = rebuilt(recorded)
        assembly = assemble(session, policy, newest_version(recorded) if version is None else version)
        done.sessions += 1
        done.account += assembly.account
        yield from rows(session, assembly)


FORMATS: dict[str, Callable[[Path, Iterable[Row]], int]] = {
    "jsonl": write_jsonl,
    "parquet": write_parquet,
    "datasets": write_datasets,
}
