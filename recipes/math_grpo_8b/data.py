"""Makes `train.parquet` and `val.parquet` of the mathematics recipe: DAPO-Math-17k and AIME 2024, in verl's columns.

    python recipes/math_grpo_8b/data.py --out DIR [--train FILE_OR_NAME] [--val FILE_OR_NAME]

Both are data sets on Hugging Face by default; with --train and --val they are parquet files of yours. Each question is
kept once: the published training file repeats each a hundred times. Files that are there already are kept.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet

from seamless_verl.errors import ConfigError, exits_on_config_error

TRAIN = "BytedTsinghua-SIA/DAPO-Math-17k:data/dapo-math-17k.parquet"
VAL = "BytedTsinghua-SIA/AIME-2024:data/aime-2024.parquet"
COLUMNS = ("data_source", "prompt", "reward_model", "extra_info")


@exits_on_config_error
def main() -> int:
    """Exit code 0, or 2 with one line on standard error for a setting that cannot work."""
    parser = argparse.ArgumentParser(description="Make the mathematics recipe's data.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the parquet files")
    parser.add_argument("--train", default=TRAIN, help="a parquet file, or DATASET:FILE on Hugging Face")
    parser.add_argument("--val", default=VAL, help="the same, to validate on")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for key in ("train", "val"):
        target = options.out / f"{key}.parquet"
        if not target.exists():
            write(unique(read(f"--{key}", getattr(options, key))), target)
    return 0


def read(key: str, source: str) -> pa.Table:
    """The rows of a file, or of a file of a data set."""
    name, _, file = source.partition(":")
    if not file and not Path(source).is_file():
        raise ConfigError(key, source, "there is no such file", "Name a parquet file, or DATASET:FILE on Hugging Face")
    if file:
        from huggingface_hub import hf_hub_download

        source = hf_hub_download(name, file, repo_type="dataset")
    table = parquet.read_table(source)
    missing = [column for column in COLUMNS if column not in table.column_names]
    if missing:
        raise ConfigError(key, source, f"has no column {missing[0]}", f"Write the columns {', '.join(COLUMNS)}")
    return table


def unique(table: pa.Table) -> pa.Table:
    """The first row of each question."""
    first: dict[str, int] = {}
    for row, prompt in enumerate(table.column("prompt").to_pylist()):
        first.setdefault(str(prompt), row)
    return table.take(list(first.values()))


def write(table: pa.Table, target: Path) -> None:
    temporary = target.with_suffix(f".{os.getpid()}")
    parquet.write_table(table, temporary)
    os.replace(temporary, target)


if __name__ == "__main__":
    sys.exit(main())
