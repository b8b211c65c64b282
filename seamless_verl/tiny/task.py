"""A task that a random model can learn from reward alone: sums of two digits.

`a+b=` where the sum has one digit. The sum is drawn evenly from 0 to 9 and then split evenly, so always
giving one answer, or guessing a digit, is right 10% of the time. There are only 55 questions, and
validation draws from the same ones: what is measured is learning from reward, not generalization.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from seamless_verl.errors import ConfigError
from seamless_verl.runtime.files import replaced_file

DATA_SOURCE = "arithmetic"


def arithmetic_rows(split: str, seed: int, count: int) -> list[dict[str, Any]]:
    """`count` rows in verl's format, the same for the same arguments; a longer list begins with the shorter.

    Raises ConfigError when `count` is not positive, since verl cannot load an empty file.
    """
    if count < 1:
        raise ConfigError(split, count, "there must be at least one row", "Ask for one or more")
    draw = random.Random(f"{DATA_SOURCE}/{split}/{seed}")
    return [_row(split, index, *_question(draw)) for index in range(count)]


def _question(draw: random.Random) -> tuple[int, int]:
    total = draw.randint(0, 9)
    first = draw.randint(0, total)
    return first, total - first


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

    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced_file(path) as temporary, temporary.open("wb") as file:  # pyarrow's errors would not name it
        parquet.write_table(pyarrow.Table.from_pylist(rows), file)


def make_arithmetic(folder: str | Path, seed: int, train: int, val: int) -> None:
    """Writes `train.parquet` and `val.parquet` with that many rows each; ConfigError for fewer than one."""
    splits = {split: arithmetic_rows(split, seed, count) for split, count in (("train", train), ("val", val))}
    for split, rows in splits.items():
        write_parquet(Path(folder) / f"{split}.parquet", rows)
