"""The beginner of long sums: what its warm start learns from, and how its command makes it."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
from support.recipes import RECIPES, load

from seamless_verl.tiny import make_tokenizer, supervised

pytestmark = pytest.mark.integration
RECIPE = RECIPES / "long_sums"
SUMS, WARM_START = load(RECIPE, "sums", "warm_start")


def test_only_answers_and_their_ends_are_learned() -> None:
    tokenizer = make_tokenizer()
    batch = next(WARM_START.batches(tokenizer, random.Random(0)))
    ids, labels = supervised.padded(batch)
    assert ids.shape == labels.shape and ids.numel() <= max(WARM_START.TOKENS, ids.shape[1])
    for row, row_labels in zip(ids.tolist(), labels.tolist(), strict=True):
        question, _, answer = tokenizer.decode(row).partition("<|assistant|>")
        learned = [label for label in row_labels if label != supervised.IGNORED]
        assert "<|user|><" in question and answer.startswith(tokenizer.decode(learned))
        assert learned[-1] == tokenizer.eos_token_id and row_labels[0] == supervised.IGNORED


def test_batches_hold_answers_of_similar_length() -> None:
    draw = WARM_START.batches(make_tokenizer(), random.Random(1))
    batches = [next(draw) for _ in range(20)]
    used = sum(supervised.length(one) for batch in batches for one in batch)
    room = sum(max(map(supervised.length, batch)) * len(batch) for batch in batches)
    assert used > 0.5 * room  # the longest answers have no equals among the pool


def test_the_command_makes_the_same_model_twice_and_refuses_no_steps(tmp_path: Path) -> None:
    command = [sys.executable, str(RECIPE / "data.py"), "--train", "4", "--val", "2", "--steps"]
    weights = []
    for name in ("a", "b"):
        subprocess.run([*command, "2", "--out", str(tmp_path / name)], check=True, capture_output=True)
        weights.append((tmp_path / name / "model" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]
    done = subprocess.run([*command, "0", "--out", str(tmp_path / "c")], capture_output=True, text=True)
    assert done.returncode == 2 and "--steps=0" in done.stderr and not (tmp_path / "c").exists()
