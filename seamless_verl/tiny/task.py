"""A task small enough for a random model to learn by reinforcement alone: sums of two digits.

`a+b=` with a one-digit answer: 55 questions, drawn uniformly. A model that always gives the commonest
answer is right 18% of the time, one that guesses a digit 10%.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from seamless_verl.tiny.files import replaced_file

DATA_SOURCE = "arithmetic"
QUESTIONS = tuple((a, b) for a in range(10) for b in range(10 - a))


def arithmetic_rows(split: str, seed: int, count: int) -> list[dict[str, Any]]:
    """`count` rows in verl's format; the same `split`, `seed` and `count` give the same rows."""
    draw = random.Random(f"{DATA_SOURCE}/{split}/{seed}")
    return [_row(split, index, *draw.choice(QUESTIONS)) for index in range(count)]


def _row(split: str, index: int, a: int, b: int) -> dict[str, Any]:
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{a}+{b}="}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(a + b)},
        "extra_info": {"split": split, "index": index},
    }


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes rows to one parquet file."""
    import pyarrow
    from pyarrow import parquet

    with replaced_file(path) as temporary:
        parquet.write_table(pyarrow.Table.from_pylist(rows), temporary)


def make_arithmetic(folder: str | Path, seed: int, train: int, val: int) -> None:
    """Writes `train.parquet` and `val.parquet` with that many rows each."""
    for split, count in (("train", train), ("val", val)):
        write_parquet(Path(folder) / f"{split}.parquet", arithmetic_rows(split, seed, count))
