"""The tool agent's beginner: its transcripts as a model sees them, how it is made, and what its command refuses."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from support.recipes import RECIPES, load

from seamless_verl.tiny import make_tokenizer

pytestmark = pytest.mark.integration
RECIPE = RECIPES / "openai_tool_agent"
AGENT, TRANSCRIPTS, DATA, REWARD = load(RECIPE, "agent", "transcripts", "data", "reward")


@pytest.fixture(scope="module")
def warm_start() -> ModuleType:
    return load(RECIPE, "agent", "transcripts", "warm_start")[-1]


def test_the_assistant_s_words_and_their_ends_are_what_is_learned(warm_start: ModuleType) -> None:
    tokenizer = make_tokenizer()
    ids, labels = next(warm_start.examples(tokenizer, random.Random(0), [warm_start.Habit.RIGHT]))
    assert tokenizer.decode(ids).startswith("<|im_start|><|user|>What is ")
    learned = tokenizer.decode([label for label in labels if label != warm_start.IGNORED])
    spoken = tokenizer.decode(ids).split("<|assistant|>")[1:]
    assert learned == "".join(part.split("<|im_end|>")[0] + "<|im_end|>" for part in spoken)
    assert all(label in (token, warm_start.IGNORED) for token, label in zip(ids, labels, strict=True))


def test_the_command_refuses_what_cannot_work(tmp_path: Path) -> None:
    command = [sys.executable, str(RECIPE / "data.py"), "--out", str(tmp_path), "--steps", "0"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "steps=0" in done.stderr and not done.stdout
    assert not (tmp_path / "model").exists()


def test_the_command_refuses_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    command = [sys.executable, str(RECIPE / "data.py"), "--out", "file"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("--out='file': ") and done.stderr.endswith(". Name a folder that can be written\n")


def test_a_model_is_made_once_for_the_same_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_start: ModuleType
) -> None:
    monkeypatch.setitem(sys.modules, "warm_start", warm_start)
    for _ in range(2):
        DATA.make_beginner(tmp_path / "model", 0, 1)
    first = (tmp_path / "model" / "model.safetensors").stat()
    DATA.make_beginner(tmp_path / "model", 0, 1)
    assert (tmp_path / "model" / "model.safetensors").stat().st_mtime_ns == first.st_mtime_ns
    DATA.make_beginner(tmp_path / "model", 0, 2)
    assert (tmp_path / "model" / "model.safetensors").stat().st_mtime_ns != first.st_mtime_ns
