"""Sums of three difficulties: those of arithmetic_grpo, and longer ones.

A third of the questions are `a+b=` with a sum of one digit, as arithmetic_grpo asks them; a third add a digit to two
digits, and a third two digits to two digits.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from seamless_verl.tiny.task import DATA_SOURCE, arithmetic_rows

LARGEST = {"middle": (99, 9), "hard": (99, 99)}
"""Of the two numbers of the longer sums, by difficulty."""
DIFFICULTIES = ("easy", *LARGEST)


@dataclass(frozen=True)
class Question:
    """A sum; `difficulty` is one of DIFFICULTIES."""

    text: str
    answer: str
    difficulty: str


def questions(split: str, seed: int, count: int) -> list[Question]:
    """`count` questions, each third of another difficulty, in turn; a longer list begins with the shorter."""
    draw = random.Random(f"{DATA_SOURCE}/longer/{split}/{seed}")
    easy = iter(arithmetic_rows(split, seed, count))
    return [
        asked(next(easy)) if name == "easy" else ask(draw, name)
        for name in (DIFFICULTIES[index % len(DIFFICULTIES)] for index in range(count))
    ]


def asked(row: dict[str, Any]) -> Question:
    """The question of a row of arithmetic_grpo's data."""
    return Question(row["prompt"][0]["content"], row["reward_model"]["ground_truth"], "easy")


def ask(draw: random.Random, difficulty: str) -> Question:
    """A random sum of more than one digit: the first number has two."""
    first, second = draw.randint(10, LARGEST[difficulty][0]), draw.randint(0, LARGEST[difficulty][1])
    return Question(f"{first}+{second}=", str(first + second), difficulty)
