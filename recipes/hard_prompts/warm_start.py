"""Warm start: a short supervised training of a small model on sums of all difficulties, for reinforcement to improve.

Without it no prompt is ever right, and there is nothing that tells hard from easy. It ends while easy sums are mostly
right, and hard ones seldom. The same arguments give the same weights on the same machine.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from sums import questions
from transformers import PreTrainedTokenizerBase

from seamless_verl.tiny.supervised import Example, example, retrain, train_on

POOL, BATCH = 30_000, 64  # questions that are drawn from, and those of a batch


def warm_start(folder: Path, seed: int, steps: int) -> None:
    """Train the model in `folder` for that many steps, and replace it by the result."""
    retrain(folder, seed, lambda model, tokenizer: train_on(model, batches(tokenizer, seed), steps))


def batches(tokenizer: PreTrainedTokenizerBase, seed: int) -> Iterator[list[Example]]:
    """Random questions of a pool, with their answers."""
    draw, pool = random.Random(f"warm start/{seed}"), questions("warm start", seed, POOL)
    while True:
        yield [example(tokenizer, one.text, one.answer) for one in draw.sample(pool, BATCH)]
