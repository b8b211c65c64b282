"""The command `trajectories export`: training sequences of closed sessions as JSONL, Parquet or a HF dataset.

Invariant: the output appears only when it is complete; until then an earlier file of the name stays.
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

from seamless_verl.cli.output import WAY_OUT, format_count, import_package, refuse_special, write
from seamless_verl.cli.show import format_account, open_journal
from seamless_verl.errors import ConfigError
from seamless_verl.journal import GroupOutcome, JournalReader, Stage
from seamless_verl.journal.recorded import TRAIN_ALL, parse_policy, recorded
from seamless_verl.journal.stored import rebuild_record
from seamless_verl.trajectory.account import Account
from seamless_verl.trajectory.export import rows, write_jsonl
from seamless_verl.trajectory.sequences import assemble

Row: TypeAlias = dict[str, Any]
OR_JSONL = ", or take --format jsonl"
JOURNAL_SUFFIXES = ("", "-wal", "-shm", "-lock")  # a journal consists of all these files
BATCH_ROWS = 256  # in memory at once while a table is written
TEXT_COLUMNS = ("uid", "session_id", "leaf_id", "closed")
OUTCOME_COLUMNS = {"outcome": "string", "step": "int64", "validation": "bool_"}  # name: Arrow type
LIST_COLUMNS = {  # name: Arrow type of its items
    "turn_ids": "string",
    "prompt_ids": "int32",
    "response_ids": "int32",
    "response_mask": "uint8",
    "rollout_log_probs": "float32",
    "weight_version": "int32",
    "grammar": "uint8",
    "span_turn_ids": "string",
    "span_starts": "int32",
    "span_stops": "int32",
    "reward_names": "string",
    "reward_values": "float64",
}


@dataclass
class ExportTotals:
    """What was exported, counted while the rows are written; `open` sessions are left out.

    `account` is of what the run has trained or dropped, `queued` of what waits to be trained.
    """

    sessions: int = 0
    open: int = 0
    queued: Account = field(default_factory=Account)
    account: Account = field(default_factory=Account)


def export_sessions(args: argparse.Namespace) -> None:
    """Raises ConfigError if there is no such policy, file or package, or the output cannot be written."""
    reader = open_journal(args.journal)
    parse_policy(args.policy or TRAIN_ALL)
    _check_output(args.out, args.journal, folder=args.format == "datasets")
    totals = ExportTotals()
    entries = _export_rows(reader, args, totals)
    try:
        count = FORMATS[args.format](args.out, entries)
    except OSError as error:
        raise ConfigError("--out", str(args.out), str(error.strerror or error), WAY_OUT) from error
    left_out = f", {format_count(totals.open, 'open session')} left out" if totals.open else ""
    write(f"{format_count(count, 'row')} of {format_count(totals.sessions, 'session')} in {args.out}{left_out}")
    queued = totals.queued
    waiting = f"; {queued.trained} of {queued.generated} more wait to be trained" if queued.generated else ""
    write(f"{format_account(totals.account)}{waiting}")


def _check_output(out: Path, journal: Path, *, folder: bool) -> None:
    if out.resolve() in [Path(f"{journal.resolve()}{suffix}") for suffix in JOURNAL_SUFFIXES]:
        raise ConfigError("--out", str(out), "it is the journal itself", "Give a file of its own")
    refuse_special("--out", out)
    if not out.parent.is_dir():
        raise ConfigError("--out", str(out), f"there is no folder {out.parent}", "Make the folder first")
    if folder and out.exists():
        raise ConfigError("--out", str(out), "it exists, and a folder is not replaced", "Remove it, or give a new name")
    if not folder and out.is_dir():
        raise ConfigError("--out", str(out), "it is a folder", "Give a file, or --format datasets and a new folder")


def _export_rows(reader: JournalReader, args: argparse.Namespace, totals: ExportTotals) -> Iterator[Row]:
    for summary in reader.sessions():
        if args.uid not in (None, summary.uid):
            continue
        if summary.stage is Stage.OPEN:
            totals.open += 1
            continue
        stored = reader.read(summary.session_id)
        if stored is None:
            continue  # it was handed over, and the run has deleted it since
        record = rebuild_record(stored, all_calls=True)
        run = recorded(stored, args.policy, args.version, args.grammar)
        assembly = assemble(record, parse_policy(run.policy), run.version, run.limits, run.grammar)
        totals.sessions += 1
        if run.queued:
            totals.queued += assembly.account
        else:
            totals.account += run.account(assembly.account)
        step = stored.group.step if stored.group is not None and stored.group.outcome is GroupOutcome.TRAINED else -1
        outcome = {"outcome": stored.outcome, "step": step, "validation": stored.validation}
        for row in rows(record, assembly):
            yield row | outcome


def write_parquet(path: Path, entries: Iterable[Row]) -> int:
    """Writes one Parquet file; returns the number of rows."""
    arrow, parquet = (import_package(name, "--format", "parquet", OR_JSONL) for name in ("pyarrow", "pyarrow.parquet"))
    return _write_complete(path, partial(_write_batches, arrow, parquet.ParquetWriter, entries))


def write_datasets(path: Path, entries: Iterable[Row]) -> int:
    """Writes a new folder for `datasets.load_from_disk`; returns the number of rows."""
    arrow, datasets = (import_package(name, "--format", "datasets", OR_JSONL) for name in ("pyarrow", "datasets"))

    def save(folder: Path) -> int:
        folder.mkdir()
        stream = folder / "rows.arrow"
        count = _write_batches(arrow, arrow.ipc.new_stream, entries, stream)
        datasets.disable_progress_bars()
        shards = None if count else 1  # without rows it would write no shard, and `load_from_disk` needs one
        datasets.Dataset.from_file(str(stream)).save_to_disk(str(folder / "whole"), num_shards=shards)
        (folder / "whole").rename(path)
        return count

    return _write_complete(path, save)


FORMATS: dict[str, Callable[[Path, Iterable[Row]], int]] = {
    "jsonl": write_jsonl,
    "parquet": write_parquet,
    "datasets": write_datasets,
}


def _write_batches(arrow: Any, writer: Callable[..., Any], entries: Iterable[Row], path: Path) -> int:
    """Writes the rows as Arrow record batches with one of pyarrow's writers; returns their number."""
    columns = [(name, arrow.string()) for name in TEXT_COLUMNS]
    columns += [(name, arrow.list_(getattr(arrow, kind)())) for name, kind in LIST_COLUMNS.items()]
    columns += [(name, getattr(arrow, kind)()) for name, kind in OUTCOME_COLUMNS.items()]
    schema = arrow.schema(columns)
    count, remaining = 0, iter(entries)
    with writer(str(path), schema) as out:
        while batch := list(islice(remaining, BATCH_ROWS)):
            assert batch[0].keys() == set(schema.names), "a column without a type would be left out"
            out.write_batch(arrow.RecordBatch.from_pylist(batch, schema=schema))
            count += len(batch)
    return count


def _write_complete(path: Path, write_to: Callable[[Path], int]) -> int:
    """Writes a file or folder under a temporary name; a file then replaces `path`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        count = write_to(temporary)
        if temporary.is_file():
            temporary.replace(path)
        return count
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        temporary.unlink(missing_ok=True)
