"""Rows of training sequences as a Parquet file or a folder of HF datasets, whole or not there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

from seamless_verl.cli.packages import needed

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
