"""What the commands of `tiny` and of the recipe make, and that they refuse before they make anything."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet
from support.paths import RECIPES

from seamless_verl.errors import ConfigError
from seamless_verl.tiny import make_model
from seamless_verl.tiny.__main__ import main

pytestmark = pytest.mark.integration
RECIPE = RECIPES / "arithmetic_grpo"
SPLITS = ("train.parquet", "val.parquet")


@pytest.mark.parametrize("file", SPLITS)
def test_rows_have_the_columns_verl_reads(nano: Path, file: str) -> None:
    rows: list[dict[str, Any]] = parquet.read_table(nano / file).to_pylist()
    assert rows
    for index, row in enumerate(rows):
        assert set(row) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
        assert row["extra_info"] == {"split": file.split(".")[0], "index": index}
        [message] = row["prompt"]
        first, second = message["content"].removesuffix("=").split("+")
        assert message["role"] == "user"
        assert row["reward_model"] == {"style": "rule", "ground_truth": str(int(first) + int(second))}


def test_the_command_writes_model_and_data(tmp_path: Path) -> None:
    arguments = ["--out", str(tmp_path), "--task", "arithmetic", "--train", "8", "--val", "4"]
    assert main(arguments) == 0
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model", *SPLITS]
    assert [parquet.read_table(tmp_path / file).num_rows for file in SPLITS] == [8, 4]


def test_a_model_has_the_positions_that_are_asked_for(tmp_path: Path) -> None:
    assert main(["--out", str(tmp_path), "--positions", "65536"]) == 0
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["max_position_embeddings"] == 65536
    with pytest.raises(ConfigError, match="positions=0"):
        make_model("nano", 0, tmp_path / "model", positions=0)


def test_the_recipe_script_answers_without_loading_a_model() -> None:
    help_text = subprocess.run(
        [sys.executable, str(RECIPE / "data.py"), "--help"], check=True, capture_output=True, text=True, timeout=300
    ).stdout
    assert "--train" in help_text and "--val" in help_text


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (["--out", "file"], "--out='file': {folder}/file is a file. Name a folder; it is made if missing"),
        (["--out", "file/sub"], "--out='file/sub': {folder}/file is a file. Name a folder; it is made if missing"),
        (["--out", "new", "--train", "0"], "--train=0: there must be at least one question. Give --train 1 or more"),
        (["--out", "new", "--val", "-3"], "--val=-3: there must be at least one question. Give --val 1 or more"),
    ],
)
def test_the_recipe_script_refuses_before_it_makes_anything(tmp_path: Path, arguments: list[str], printed: str) -> None:
    (tmp_path / "file").touch()
    command = [sys.executable, str(RECIPE / "data.py"), *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (2, printed.format(folder=tmp_path) + "\n")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_importing_the_package_loads_no_heavy_library() -> None:
    code = "import sys, seamless_verl.tiny; sys.exit(bool({'torch', 'transformers', 'pyarrow'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0
