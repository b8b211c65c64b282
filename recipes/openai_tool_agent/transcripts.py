"""Questions for the calculator, and how a beginner who has seen the tool used answers them.

A question has two operations, and every number in it and on the way has two digits, so that what is to be
copied always stands equally far back. Each habit below is one way of answering; only `RIGHT` is to be kept.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from enum import Enum, unique
from typing import Any

from agent import calculator

LOW, HIGH = 10, 99
OPERATIONS = 2


@dataclass(frozen=True)
class Question:
    """`numbers` joined by `signs` (one fewer), worked out from the left."""

    numbers: tuple[int, ...]
    signs: str

    @property
    def expression(self) -> str:
        return str(self.numbers[0]) + "".join(f"{s}{n}" for s, n in zip(self.signs, self.numbers[1:], strict=True))

    @property
    def text(self) -> str:
        return f"What is {self.expression}?"

    @property
    def steps(self) -> list[str]:
        """The operations that lead to the answer, e.g. 37+41 and 78-12."""
        value, steps = str(self.numbers[0]), []
        for sign, number in zip(self.signs, self.numbers[1:], strict=True):
            steps.append(f"{value}{sign}{number}")
            value = calculator(steps[-1])
        return steps

    @property
    def answer(self) -> str:
        return calculator(self.steps[-1])


def ask(draw: random.Random) -> Question:
    """Any start, and then any operation that leaves two digits."""
    value = draw.randint(LOW, HIGH)
    numbers, signs = [value], ""
    for _ in range(OPERATIONS):
        sign = draw.choice([s for s, room in (("+", HIGH - value), ("-", value - LOW)) if room >= LOW])
        number = draw.randint(LOW, HIGH - value if sign == "+" else value - LOW)
        value += number if sign == "+" else -number
        numbers.append(number)
        signs += sign
    return Question(tuple(numbers), signs)


@unique  # two of one share would be one habit
class Habit(Enum):
    """Ways of answering, with their shares of 15."""

    RIGHT = 8
    """an operation at a time, then the last result"""
    HASTE = 5
    """the first call alone, and its result"""
    WHOLE = 2
    """the whole question in one call, which is an error; then any number"""


def transcript(question: Question, habit: Habit, draw: random.Random) -> list[dict[str, Any]]:
    """The conversation as chat messages, from the question to the answer; `draw` gives any number."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question.text}]
    guess = draw.randint(LOW, HIGH)
    for expression in calls(question, habit):
        messages += called(expression)
    answer = guess if habit is Habit.WHOLE else messages[-1]["content"]
    return [*messages, {"role": "assistant", "content": f"Answer: {answer}"}]


def calls(question: Question, habit: Habit) -> list[str]:
    """The expressions that the calculator is asked for."""
    if habit is Habit.WHOLE:
        return [question.expression]
    return question.steps[: 1 if habit is Habit.HASTE else OPERATIONS]


def called(expression: str) -> list[dict[str, Any]]:
    """A call of the tool and its result."""
    function = {"name": "calculator", "arguments": json.dumps({"expression": expression})}
    return [
        {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": calculator(expression)},
    ]
