"""Rows of training sequences as a Parquet file or a folder of HF datasets, whole or not there.

`trajectories export`: what would be trained of each closed session.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

from seamless_verl.cli.reading import newest_version, opened, parsed_policy, rebuilt
from seamless_verl.cli.show import account_line
from seamless_verl.cli.text import counted, needed, write
from seamless_verl.errors import ConfigError
from seamless_verl.journal import JournalReader, Stage
from seamless_verl.trajectory.account import Account
from seamless_verl.trajectory.export import rows, write_jsonl
from seamless_verl.trajectory.policies import TokenPolicy
from seamless_verl.trajectory.sequences import assemble

Row: TypeAlias = dict[str, Any]
ELSE = ", or take --format jsonl"
BATCH = 256  # rows held at once while a table is written
TEXT = ("uid", "session_id", "leaf_id", "closed")
LISTS = {
    "turn_ids": "string",
    "prompt_ids": "int32",
    "response_ids": "int32",
    "response_mask": "uint8",
    "rollout_log_probs": "float32",
    "weight_version": "int32",
    "span_turn_ids": "string",
    "span_starts": "int32",
    "span_stops": "int32",
    "reward_names": "string",
    "reward_values": "float64",
}


def write_parquet(path: Path, entries: Iterable[Row]) -> int:
    """One Parquet file; returns how many rows."""
    arrow, parquet = (needed(name, "--format", "parquet", ELSE) for name in ("pyarrow", "pyarrow.parquet"))
    return _written(path, partial(_fill, arrow, parquet.ParquetWriter, entries))


def write_datasets(path: Path, entries: Iterable[Row]) -> int:
    """A new folder that `datasets.load_from_disk` reads; returns how many rows."""
    arrow, datasets = (needed(name, "--format", "datasets", ELSE) for name in ("pyarrow", "datasets"))

    def save(place: Path) -> int:
        place.mkdir()
        stream = place / "rows.arrow"
        count = _fill(arrow, arrow.ipc.new_stream, entries, stream)
        datasets.disable_progress_bars()
        shards = None if count else 1  # of no rows it would make no shard, and `load_from_disk` wants one
        datasets.Dataset.from_file(str(stream)).save_to_disk(str(place / "whole"), num_shards=shards)
        (place / "whole").rename(path)
        return count

    return _written(path, save)


def _fill(arrow: Any, writer: Callable[..., Any], entries: Iterable[Row], place: Path) -> int:
    """Rows as Arrow record batches, by a writer of pyarrow's."""
    columns = [(name, arrow.string()) for name in TEXT]
    schema = arrow.schema(columns + [(name, arrow.list_(getattr(arrow, kind)())) for name, kind in LISTS.items()])
    count, left = 0, iter(entries)
    with writer(str(place), schema) as out:
        while batch := list(islice(left, BATCH)):
            assert batch[0].keys() == set(schema.names), "a column without a type would be left out"
            out.write_batch(arrow.RecordBatch.from_pylist(batch, schema=schema))
            count += len(batch)
    return count


def _written(path: Path, fill: Callable[[Path], int]) -> int:
    """Fills a file or folder under a temporary name, and puts a file in place."""
    place = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        count = fill(place)
        if place.is_file():
            place.replace(path)
        return count
    finally:
        if place.is_dir():
            shutil.rmtree(place)
        place.unlink(missing_ok=True)


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
    reader: JournalReader, policy: TokenPolicy, version: int | None, uid: str | None, done: Exported
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
