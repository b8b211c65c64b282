"""The arithmetic data in verl's format, its command line, and the recipe's reward."""

from __future__ import annotations

import errno
import importlib.util
import os
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.paths import RECIPES

from seamless_verl.errors import ConfigError
from seamless_verl.runtime.files import replaced_file
from seamless_verl.tiny import make_arithmetic
from seamless_verl.tiny.__main__ import main
from seamless_verl.tiny.files import writing_to
from seamless_verl.tiny.task import arithmetic_rows

RECIPE = RECIPES / "arithmetic_grpo"
SPLITS = ("train.parquet", "val.parquet")


def load_reward() -> ModuleType:
    """Loads the file by its path, as verl does."""
    spec = importlib.util.spec_from_file_location("arithmetic_reward", RECIPE / "reward.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


REWARD = load_reward()


def grade(response: str, truth: str = "8") -> tuple[float, float]:
    result = REWARD.compute_score("arithmetic", response, truth, {"index": 0}, unused=None)
    return result["score"], result["acc"]


def test_files_depend_on_the_seed_alone(tmp_path: Path) -> None:
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        make_arithmetic(tmp_path / name, seed, 64, 64)
    first, again, other = ([(tmp_path / name / file).read_bytes() for file in SPLITS] for name in "abc")
    assert first == again
    assert all(ours != theirs for ours, theirs in zip(first, other, strict=True))
    assert sorted(entry.name for entry in (tmp_path / "a").iterdir()) == list(SPLITS)


def test_splits_are_drawn_apart_and_more_rows_begin_with_the_fewer() -> None:
    questions = {split: [row["prompt"] for row in arithmetic_rows(split, 0, 64)] for split in ("train", "val")}
    assert questions["train"] != questions["val"]
    assert arithmetic_rows("train", 0, 128)[:64] == arithmetic_rows("train", 0, 64)


def test_no_answer_is_common_enough_to_be_a_strategy() -> None:
    answers = Counter(row["reward_model"]["ground_truth"] for row in arithmetic_rows("train", 0, 4096))
    assert set(answers) == set("0123456789")
    assert max(answers.values()) < 0.12 * 4096


def test_an_empty_split_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="val=0"):
        make_arithmetic(tmp_path, 0, 16, 0)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "data"
    target.write_text("old")
    with pytest.raises(RuntimeError, match="torn"), replaced_file(target) as temporary:
        temporary.write_text("half")
        raise RuntimeError("torn")
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def opened_below_a_file(folder: Path) -> None:
    (folder / "file").touch()
    (folder / "file" / "data").open("wb")


def test_what_concerns_the_folder_is_told_as_its_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Name a folder that can be written") as told, writing_to(tmp_path):
        opened_below_a_file(tmp_path)
    assert (told.value.key, told.value.value) == ("--out", str(tmp_path))
    with pytest.raises(ConfigError), writing_to(tmp_path / "file" / "deep" / "er"):
        (tmp_path / "file" / "deep").mkdir()  # on the way to it
    with pytest.raises(ConfigError), writing_to(Path(os.path.relpath(tmp_path))):
        os.replace(tmp_path / "none", tmp_path / "other")
    (tmp_path / "link").symlink_to("/dev/null")
    with pytest.raises(ConfigError), writing_to(tmp_path):
        (tmp_path / "link" / "data").touch()


@pytest.mark.parametrize(("leads_to", "reason"), [("none/data", "No such file"), ("/dev/full", "No space left")])
def test_rows_that_cannot_be_written_are_the_folders_mistake(tmp_path: Path, leads_to: str, reason: str) -> None:
    (tmp_path / f".train.parquet.{os.getpid()}").symlink_to(leads_to)
    with pytest.raises(ConfigError, match=reason), writing_to(tmp_path):
        make_arithmetic(tmp_path, 0, 4, 4)
    assert not list(tmp_path.iterdir())


def test_what_goes_wrong_elsewhere_is_left_as_it_is(tmp_path: Path) -> None:
    (out := tmp_path / "out").mkdir()
    with pytest.raises(NotADirectoryError), writing_to(out):
        opened_below_a_file(tmp_path)
    with pytest.raises(BlockingIOError), writing_to(out):
        raise OSError(errno.EAGAIN, "no more processes")
    with pytest.raises(OSError, match="no model"), writing_to(out):
        raise OSError("no model")  # as transformers says it


def test_the_command_ends_with_two_and_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").write_text("a file")
    assert main(["--out", str(tmp_path)]) == 2
    assert "Name a new or empty folder" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--train", "--val"])
def test_the_command_refuses_no_rows_before_it_imports_what_takes_seconds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    assert main(["--out", str(tmp_path / "new"), "--task", "arithmetic", option, "0"]) == 2
    assert capsys.readouterr().err == f"{option}=0: there must be at least one row. Give {option} 1 or more\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("response", "score", "acc"),
    [
        ("8", 1.0, 1.0),
        ("8abc", 0.85, 1.0),
        ("8 8", 0.8 + 0.2 / 3, 1.0),
        ("7", 0.1 + 0.2 * 2 / 3 + 0.1, 0.0),
        ("6", 0.1 + 0.2 / 3 + 0.1, 0.0),
        ("5", 0.2, 0.0),
        ("08", 0.1 + 0.2 + 0.05, 0.0),
        ("88", 0.15, 0.0),
        ("", 0.0, 0.0),
        (" 8", 0.0, 0.0),
        ("x8", 0.0, 0.0),
        ("-8", 0.0, 0.0),
        ("\u0668", 0.0, 0.0),
        ("\ufffd8", 0.0, 0.0),
    ],
)
def test_reward_of(response: str, score: float, acc: float) -> None:
    assert grade(response) == (pytest.approx(score), acc)


@given(st.text(alphabet="0123456789 x") | st.text(), st.integers(0, 9))
def test_any_wrong_answer_is_worth_less_than_half_of_any_right_one(response: str, truth: int) -> None:
    score, acc = grade(response, str(truth))
    assert 0.8 < score <= 1.0 if acc else 0.0 <= score < 0.36


def test_a_very_long_number_is_graded() -> None:
    score, acc = grade("8" * 10_000)
    assert (score, acc) == (pytest.approx(0.1, abs=1e-4), 0.0)
