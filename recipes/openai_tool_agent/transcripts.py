"""Questions for the calculator, and example conversations that answer them rightly and wrongly.

A question has two operations. Every number in it and every result on the way has two digits, so that what is to be
copied is always equally far back. Each habit is one way of answering; reinforcement is to keep only `RIGHT`.
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
    """`numbers` joined by `signs` (one fewer), evaluated from the left."""

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
    """A random start, then random operations whose results have two digits."""
    value = draw.randint(LOW, HIGH)
    numbers, signs = [value], ""
    for _ in range(OPERATIONS):
        sign = draw.choice([s for s, room in (("+", HIGH - value), ("-", value - LOW)) if room >= LOW])
        number = draw.randint(LOW, HIGH - value if sign == "+" else value - LOW)
        value += number if sign == "+" else -number
        numbers.append(number)
        signs += sign
    return Question(tuple(numbers), signs)


@unique  # two members with the same share would be one
class Habit(Enum):
    """Ways of answering, with their shares of 15."""

    RIGHT = 8
    """an operation at a time, then the last result"""
    FIRST_CALL_ONLY = 5
    """only the first call, and its result"""
    WHOLE_QUESTION = 2
    """the whole question in one call, which is an error; then any number"""


def transcript(question: Question, habit: Habit, draw: random.Random) -> list[dict[str, Any]]:
    """The conversation as chat messages, from the question to the answer; `draw` gives a random number."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question.text}]
    guess = draw.randint(LOW, HIGH)
    for expression in calls(question, habit):
        messages += call_and_result(expression)
    answer = guess if habit is Habit.WHOLE_QUESTION else messages[-1]["content"]
    return [*messages, {"role": "assistant", "content": f"Answer: {answer}"}]


def calls(question: Question, habit: Habit) -> list[str]:
    """The expressions that the calculator is asked for."""
    if habit is Habit.WHOLE_QUESTION:
        return [question.expression]
    return question.steps[: 1 if habit is Habit.FIRST_CALL_ONLY else OPERATIONS]


def call_and_result(expression: str) -> list[dict[str, Any]]:
    """A call of the tool and its result."""
    function = {"name": "calculator", "arguments": json.dumps({"expression": expression})}
    return [
        {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": calculator(expression)},
    ]
