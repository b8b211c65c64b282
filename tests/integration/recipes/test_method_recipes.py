"""The recipes of methods, from their commands to what a run would be given: their data, and settings that pass."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet
from support.paths import child_environment
from support.recipes import RECIPES, load

from seamless_verl.cli.main import make_parser, settings_first
from seamless_verl.tiny import make_tokenizer, supervised
from seamless_verl.tools.compare.arms import parse_arms
from seamless_verl.tools.compare.budget import select
from seamless_verl.tools.compare.command import FLAGS
from seamless_verl.tools.compare.job import RESULT, Options

pytestmark = pytest.mark.integration
REWARD = "reward.custom_reward_function.path"
METHODS: dict[str, dict[str, Any]] = {
    "hard_prompts": {"seamless.sampler.name": "dars", REWARD: RECIPES / "arithmetic_grpo" / "reward.py"},
    "turns": {"algorithm.adv_estimator": "hgpo", REWARD: RECIPES / "openai_tool_agent" / "reward.py"},
    "replay_history": {"seamless.sampler.name": "srpo", "seamless.sampler.success": 0.8},
}


def script(recipe: str, folder: Path, *overrides: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """run.sh of the recipe, which checks the settings in the place of a run, and a warm start of one step."""
    env = os.environ | child_environment() | {"PYTHON": sys.executable, "VERL_PLATFORM": "cpu", "WARM_STEPS": "1"}
    env |= {
        "DATA": str(folder / "data"),
        "MAIN": "seamless_verl.tools.compare.probe",
        RESULT: str(folder / "probed.json"),
    }
    command = [RECIPES / recipe / "run.sh", *overrides]
    return subprocess.run(command, cwd=folder, env=env | variables, capture_output=True, text=True)


@pytest.mark.parametrize("recipe", METHODS)
def test_the_settings_pass_with_the_data_that_the_command_makes(recipe: str, tmp_path: Path) -> None:
    done = script(recipe, tmp_path, QUESTIONS="24")
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "seamless." in line and "chosen: " not in line]
    assert said == [], "a warning of a setting that is not read, or does nothing"
    assert {path.name for path in (tmp_path / "data").iterdir()} == {"model", "train.parquet", "val.parquet"}
    questions = parquet.read_table(tmp_path / "data" / "train.parquet").num_rows
    assert questions == {"hard_prompts": 24, "turns": 2048, "replay_history": 24}[recipe]
    config = json.loads((tmp_path / "probed.json").read_text())["config"]
    places = {"data.train_files": tmp_path / "data" / "train.parquet", "trainer.project_name": recipe}
    for key, expected in (METHODS[recipe] | places).items():
        value = select(config, key)
        assert (Path(value).resolve() if isinstance(expected, Path) else value) == expected, key


@pytest.mark.parametrize(
    ("recipe", "override", "key"),
    [
        ("hard_prompts", "algorithm.norm_adv_by_std_in_grpo=true", "algorithm.norm_adv_by_std_in_grpo"),
        ("turns", "seamless.gateway.enabled=false", "algorithm.adv_estimator"),
    ],
)
def test_what_contradicts_the_method_is_refused_before_anything_is_made(
    recipe: str, override: str, key: str, tmp_path: Path
) -> None:
    done = script(recipe, tmp_path, override)
    assert done.returncode == 2 and f"{key}=" in done.stderr, done.stderr
    assert not list(tmp_path.iterdir())


def test_only_answers_and_their_ends_are_learned_in_the_warm_start() -> None:
    sums, warm_start = load(RECIPES / "hard_prompts", "sums", "warm_start")
    tokenizer = make_tokenizer()
    batch = random.Random("warm start/0").sample(sums.questions("warm start", 0, warm_start.POOL), warm_start.BATCH)
    ids, labels = supervised.padded(next(warm_start.batches(tokenizer, 0)))
    for question, row, row_labels in zip(batch, ids.tolist(), labels.tolist(), strict=True):
        learned = [label for label in row_labels if label != supervised.IGNORED]
        assert tokenizer.decode(learned[:-1]) == question.answer and learned[-1] == tokenizer.eos_token_id
        text = tokenizer.decode(row)
        assert f"<|user|>{question.text}" in text and f"<|assistant|>{question.answer}" in text


def test_the_same_warm_start_gives_the_same_model(tmp_path: Path) -> None:
    command = [sys.executable, RECIPES / "hard_prompts" / "data.py", "--train", "4", "--val", "2", "--steps"]
    weights = []
    for name in ("a", "b"):
        subprocess.run([*command, "2", "--out", tmp_path / name], check=True, capture_output=True)
        weights.append((tmp_path / name / "model" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]
    done = subprocess.run([*command, "0", "--out", tmp_path / "c"], capture_output=True, text=True)
    assert done.returncode == 2 and "--steps=0" in done.stderr and not (tmp_path / "c").exists()


@pytest.mark.parametrize("recipe", METHODS)
def test_the_table_is_one_command_that_compare_takes(recipe: str, tmp_path: Path) -> None:
    """The command is printed in the place of being run; its arms have the settings of their methods."""
    printing = tmp_path / "python"
    printing.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    printing.chmod(0o755)
    command = [RECIPES / recipe / "methods.sh", "--steps", "40", "data.seed=7"]
    done = subprocess.run(
        command, env=os.environ | {"PYTHON": str(printing)}, check=True, capture_output=True, text=True
    )
    _, module, name, *words = done.stdout.splitlines()
    assert (module, name) == ("seamless_verl.cli", "compare")
    given = make_parser().parse_args([name, *settings_first(words, FLAGS)])
    assert given.equal_tokens and given.steps == 40 and given.seeds == "1,2,3" and "data.seed=7" in given.job
    arms = parse_arms(given.arms)
    assert arms[0].name == "grpo" and all(arm.is_ours for arm in arms)
    Options(given.steps, validate=given.validate, equal_tokens=True).check()
