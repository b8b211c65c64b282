"""Warm start: a short supervised training of a small model on written-out chains, for reinforcement to improve.

No model of this size finds the steps by chance. The answers that it learns from are somebody's who is careless: one in
thirty digits of a sum is a random one. The model learns the steps, and to be as careless: a third of its answers are
right, and one in six of the long ones. The same arguments give the same weights on the same machine.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from sums import ask, careless_answer
from transformers import PreTrainedTokenizerBase

from seamless_verl.tiny.supervised import Example, example, length, retrain, train_on

TOKENS, POOL = 4000, 64  # of a batch, padding included; the answers among which a batch finds some of similar length
MISTAKES = 0.03  # the share of digits in the warm start's answers that are random ones


def warm_start(folder: Path, seed: int, steps: int) -> None:
    """Train the model in `folder` for that many steps, and replace it by the result."""
    draw = random.Random(f"warm start/{seed}")
    retrain(folder, seed, lambda model, tokenizer: train_on(model, batches(tokenizer, draw), steps))


def batches(tokenizer: PreTrainedTokenizerBase, draw: random.Random) -> Iterator[list[Example]]:
    """Examples of similar length, as many as TOKENS has room for; a batch begins at any of them, long or short."""
    while True:
        pool = sorted((careless(tokenizer, draw) for _ in range(POOL)), key=length)
        first = draw.randrange(POOL)
        last = first + 1
        while last < POOL and (last + 1 - first) * length(pool[last]) < TOKENS:
            last += 1
        yield pool[first:last]


def careless(tokenizer: PreTrainedTokenizerBase, draw: random.Random) -> Example:
    """A question, and a careless answer."""
    question = ask(draw)
    return example(tokenizer, question.text, careless_answer(question, draw, MISTAKES))
