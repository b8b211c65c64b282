"""Makes the model, the repositories and the data of the swe_agent recipe, in one folder:

model/                          the tiny model, unless --size none; an existing one of the same settings is kept
train.parquet, val.parquet      one row a repository: the issue as prompt, the folders in extra_info
repositories/<split>/<index>/   what the agent gets a copy of
tests/<split>/<index>/          what it is graded with

python recipes/swe_agent/data.py --out DIR [--size nano] [--positions 8192] [--seed 0] [--train 64] [--val 8]
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

from bugs import Repository, draw_repository

from seamless_verl.errors import ConfigError, exits_on_config_error
from seamless_verl.tiny import SIZES, keep_or_make_model
from seamless_verl.tiny.files import replaced_folder, writing_to
from seamless_verl.tiny.models import MAX_POSITIONS
from seamless_verl.tiny.task import write_parquet

DATA_SOURCE, HIDDEN = "swe_agent", "test_hidden.py"
MARKER = "made_by_data.py"  # a folder with this file was made here, and may be replaced


@exits_on_config_error
def main() -> int:
    """Exit code 0, or 2 with one line on standard error for a setting that cannot work."""
    parser = argparse.ArgumentParser(description="Make the swe_agent recipe's model, repositories and data.")
    parser.add_argument("--out", type=Path, required=True, help="folder for all of it")
    parser.add_argument("--size", choices=[*SIZES, "none"], default="nano", help="none makes no model")
    parser.add_argument("--positions", type=int, default=MAX_POSITIONS, help="the model's longest sequence, in tokens")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the data")
    parser.add_argument("--train", type=int, default=64, help="repositories to train on")
    parser.add_argument("--val", type=int, default=8, help="repositories to validate on")
    options = parser.parse_args()
    splits = {"train": options.train, "val": options.val}
    with writing_to(options.out):
        for split, count in splits.items():
            check_count(split, count)
        for split, count in splits.items():
            make_split(options.out.resolve(), split, options.seed, count)
        if options.size != "none":
            keep_or_make_model(options.size, options.seed, options.out / "model", options.positions)
    return 0


def check_count(split: str, count: int) -> None:
    """Raise ConfigError for fewer than one, since verl cannot load an empty file."""
    if count < 1:
        raise ConfigError(f"--{split}", count, "there must be at least one repository", f"Give --{split} 1 or more")


def make_split(out: Path, split: str, seed: int, count: int) -> None:
    """The repositories, their tests and their rows."""
    draw = random.Random(f"{DATA_SOURCE}/{split}/{seed}")
    repositories = [draw_repository(draw) for _ in range(count)]
    for name, files_of in (("repositories", visible_files), ("tests", hidden_files)):
        with replaced_folder(out / name / split, marker=MARKER) as folder:
            (folder / MARKER).touch()
            for index, repository in enumerate(repositories):
                write_files(folder / str(index), files_of(repository))
    rows = [row(out, split, index, repository) for index, repository in enumerate(repositories)]
    write_parquet(out / f"{split}.parquet", rows)


def visible_files(repository: Repository) -> dict[str, str]:
    return repository.files


def hidden_files(repository: Repository) -> dict[str, str]:
    return {HIDDEN: repository.hidden}


def write_files(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def row(out: Path, split: str, index: int, repository: Repository) -> dict[str, Any]:
    """One row in verl's format; `ground_truth` is the bug's kind, for readers of the data only."""
    folders = {"repository": out / "repositories", "tests": out / "tests"}
    places = {name: str(folder / split / str(index)) for name, folder in folders.items()}
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": repository.issue}],
        "ability": "code",
        "reward_model": {"style": "rule", "ground_truth": repository.kind},
        "extra_info": {"split": split, "index": index, **places},
    }


if __name__ == "__main__":
    sys.exit(main())
