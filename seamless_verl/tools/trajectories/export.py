"""The command `trajectories export`: training sequences of closed sessions as JSONL, Parquet or a HF dataset.

Invariant: the output appears only when it is complete; until then an earlier file of the name stays.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

from seamless_verl.cli.output import format_count, import_package, write, writing
from seamless_verl.errors import ConfigError
from seamless_verl.journal import GroupOutcome, JournalReader, Stage
from seamless_verl.journal.stored import rebuild_record
from seamless_verl.runtime.files import replaced_file
from seamless_verl.tools.trajectories.recorded import TRAIN_ALL, recorded
from seamless_verl.tools.trajectories.show import format_account, open_journal
from seamless_verl.trajectory.account import Account
from seamless_verl.trajectory.policies import parse_policy
from seamless_verl.trajectory.sequences import Assembly, TrainingSequence, assemble
from seamless_verl.trajectory.session import SessionRecord

Row: TypeAlias = dict[str, Any]
OR_JSONL = ", or take --format jsonl"
JOURNAL_SUFFIXES = ("", "-wal", "-shm", "-lock")  # a journal consists of all these files
BATCH_ROWS = 256  # in memory at once while a table is written
ARRAYS = ("prompt_ids", "response_ids", "response_mask", "rollout_log_probs", "weight_version", "grammar")
COLUMNS = {  # name: Arrow type, or that of its items where it is a list
    **dict.fromkeys(("uid", "session_id", "leaf_id", "closed"), "string"),
    "turn_ids": ["string"],
    "prompt_ids": ["int32"],
    "response_ids": ["int32"],
    "response_mask": ["uint8"],
    "rollout_log_probs": ["float32"],
    "weight_version": ["int32"],
    "grammar": ["uint8"],
    "span_turn_ids": ["string"],
    "span_starts": ["int32"],
    "span_stops": ["int32"],
    "reward_names": ["string"],
    "reward_values": ["float64"],
    "outcome": "string",
    "step": "int64",
    "validation": "bool_",
}


@dataclass
class ExportTotals:
    """What was exported, counted while the rows are written; `open` sessions are left out.

    `account` is of what the run has trained or dropped, `queued` of what waits to be trained. `images` counts the rows
    with images.
    """

    sessions: int = 0
    open: int = 0
    images: int = 0
    queued: Account = field(default_factory=Account)
    account: Account = field(default_factory=Account)


def export_sessions(args: argparse.Namespace) -> None:
    """Raises ConfigError if there is no such policy, file or package, or the output cannot be written."""
    reader = open_journal(args.journal)
    parse_policy(args.policy or TRAIN_ALL)
    out, totals = args.out, ExportTotals()
    if out.resolve() in [Path(f"{args.journal.resolve()}{suffix}") for suffix in JOURNAL_SUFFIXES]:
        raise ConfigError("--out", str(out), "it is the journal itself", "Give a file of its own")
    with writing("--out", out):
        _check_place(out, folder=args.format == "datasets")
        count = FORMATS[args.format](out, _export_rows(reader, args, totals))
    left_out = f", {format_count(totals.open, 'open session')} left out" if totals.open else ""
    write(f"{format_count(count, 'row')} of {format_count(totals.sessions, 'session')} in {out}{left_out}")
    if totals.images:
        write(f"images: {format_count(totals.images, 'row')} with placeholders alone; the files are in the journal")
    queued = totals.queued
    waiting = f"; {queued.trained} of {queued.generated} more wait to be trained" if queued.generated else ""
    write(f"{format_account(totals.account)}{waiting}")


def _check_place(out: Path, *, folder: bool) -> None:
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
        totals.images += sum(bool(sequence.images) for sequence in assembly.sequences)
        if run.queued:
            totals.queued += assembly.account
        else:
            totals.account += run.account(assembly.account)
        step = stored.group.step if stored.group is not None and stored.group.outcome is GroupOutcome.TRAINED else -1
        outcome = {"outcome": stored.outcome, "step": step, "validation": stored.validation}
        for row in rows(record, assembly):
            yield row | outcome


def rows(session: SessionRecord, assembly: Assembly) -> list[Row]:
    """One row of plain values per training sequence; all rows of all sessions have the same columns.

    Columns: uid, session_id, leaf_id, closed (str, empty while open), turn_ids (list of str), the six arrays of
    TrainingSequence as lists, span_turn_ids, span_starts and span_stops (one entry per generated run of the response),
    reward_names and reward_values (one entry per reward).
    """
    return [_row(session, sequence) for sequence in assembly.sequences]


def _row(session: SessionRecord, sequence: TrainingSequence) -> Row:
    return {
        "uid": session.uid,
        "session_id": session.session_id,
        "leaf_id": sequence.leaf_id,
        "closed": str(session.closed or ""),
        "turn_ids": list(sequence.turn_ids),
        **{name: getattr(sequence, name).tolist() for name in ARRAYS},
        "span_turn_ids": [span.turn_id for span in sequence.spans],
        "span_starts": [span.start for span in sequence.spans],
        "span_stops": [span.stop for span in sequence.spans],
        "reward_names": list(session.rewards),
        "reward_values": list(session.rewards.values()),
    }


def write_jsonl(path: Path, entries: Iterable[Row]) -> int:
    """Writes one JSON object a line; returns their number. ValueError for a number that is not finite."""
    count = 0
    with replaced_file(path) as temporary, temporary.open("w", encoding="utf-8") as out:
        for entry in entries:
            out.write(json.dumps(entry, ensure_ascii=False, allow_nan=False) + "\n")
            count += 1
    return count


def write_parquet(path: Path, entries: Iterable[Row]) -> int:
    """Writes one Parquet file; returns the number of rows."""
    arrow, parquet = (import_package(name, "--format", "parquet", OR_JSONL) for name in ("pyarrow", "pyarrow.parquet"))
    with replaced_file(path) as temporary:
        return _write_batches(arrow, parquet.ParquetWriter, entries, temporary)


def write_datasets(path: Path, entries: Iterable[Row]) -> int:
    """Writes a new folder for `datasets.load_from_disk`; returns the number of rows."""
    arrow, datasets = (import_package(name, "--format", "datasets", OR_JSONL) for name in ("pyarrow", "datasets"))
    with TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        stream, whole = Path(folder, "rows.arrow"), Path(folder, "whole")
        count = _write_batches(arrow, arrow.ipc.new_stream, entries, stream)
        datasets.disable_progress_bars()
        shards = None if count else 1  # without rows it would write no shard, and `load_from_disk` needs one
        datasets.Dataset.from_file(str(stream)).save_to_disk(str(whole), num_shards=shards)
        whole.rename(path)
        return count


FORMATS: dict[str, Callable[[Path, Iterable[Row]], int]] = {
    "jsonl": write_jsonl,
    "parquet": write_parquet,
    "datasets": write_datasets,
}


def _write_batches(arrow: Any, writer: Callable[..., Any], entries: Iterable[Row], path: Path) -> int:
    """Writes the rows as Arrow record batches with one of pyarrow's writers; returns their number."""
    schema = arrow.schema(
        (name, getattr(arrow, kind)() if isinstance(kind, str) else arrow.list_(getattr(arrow, kind[0])()))
        for name, kind in COLUMNS.items()
    )
    count, remaining = 0, iter(entries)
    with writer(str(path), schema) as out:
        while batch := list(islice(remaining, BATCH_ROWS)):
            assert batch[0].keys() == set(schema.names), "a column without a type would be left out"
            out.write_batch(arrow.RecordBatch.from_pylist(batch, schema=schema))
            count += len(batch)
    return count
