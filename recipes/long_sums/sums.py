"""Chains of sums, written out: the lengths are the model's own, and a few are very long.

A question is a bound and two numbers, `<07 37 45`. Its answer adds the last two numbers again and again, in two digits,
until a result is below the bound. A step is written from the ones up: `37+45:12,08` is 7 + 5 = 12, then 3 + 4 + 1 = 08,
so 82, and the next one begins with `45+82`. The smaller the bound, the longer the chain: harder means longer.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

MEDIAN, SIGMA = 12.0, 0.8
"""Of the lognormal distribution of the bounds, which are cut to LOWEST .. HIGHEST."""
LOWEST, HIGHEST = 2, 60
LONGEST = 50
"""Steps, twelve characters each: questions with longer chains are not asked."""


@dataclass(frozen=True)
class Question:
    """Numbers from 0 to 99; the answer ends at the first result below `bound`."""

    bound: int
    first: int
    second: int

    @property
    def text(self) -> str:
        return f"<{self.bound:02} {self.first:02} {self.second:02}"

    @property
    def steps(self) -> list[str]:
        """The right steps; one more than LONGEST where the chain is longer than may be asked."""
        return self.written(lambda digit: digit)

    def written(self, write: Callable[[int], int]) -> list[str]:
        """The steps of somebody who writes `write(digit)` for each right digit, and goes on from what is written."""
        first, second = self.first, self.second
        steps: list[str] = []
        while len(steps) <= LONGEST:
            ones = _sum_of(first % 10 + second % 10, write)
            tens = _sum_of(first // 10 + second // 10 + ones // 10, write)
            steps.append(f"{first:02}+{second:02}:{ones:02},{tens:02}")
            first, second = second, tens % 10 * 10 + ones % 10
            if second < self.bound:
                break
        return steps

    @property
    def answer(self) -> str:
        return " ".join(self.steps)


def _sum_of(exact: int, write: Callable[[int], int]) -> int:
    return exact // 10 * 10 + write(exact % 10)


def careless_answer(question: Question, draw: random.Random, mistakes: float) -> str:
    """An answer in which each digit of a sum is a random one with probability `mistakes`; at most LONGEST steps."""
    while True:
        steps = question.written(lambda digit: draw.randrange(10) if draw.random() < mistakes else digit)
        if len(steps) <= LONGEST:
            return " ".join(steps)


def ask(draw: random.Random) -> Question:
    """A random question with at most LONGEST steps: half have five or fewer, one in ten more than twenty."""
    while True:
        bound = min(HIGHEST, max(LOWEST, round(MEDIAN * math.exp(draw.gauss(0.0, SIGMA)))))
        question = Question(bound, draw.randint(0, 99), draw.randint(0, 99))
        if len(question.steps) <= LONGEST:
            return question
