"""The tool agent's recipe without a model: its tool, its talk with any server, its questions and its reward."""

from __future__ import annotations

import asyncio
import json
import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.recipes import RECIPES, load

from seamless_verl.agents.callable import load_agent
from seamless_verl.errors import ConfigError

RECIPE = RECIPES / "openai_tool_agent"
AGENT, TRANSCRIPTS, DATA, REWARD = load(RECIPE, "agent", "transcripts", "data", "reward")
Habit = TRANSCRIPTS.Habit


@pytest.mark.parametrize(
    ("expression", "value"),
    [("37+41", "78"), ("12-41", "-29"), ("37*4", "148"), (" 1 + 2 ", "3"), ("007+1", "8")],
)
def test_one_operation_is_worked_out(expression: str, value: str) -> None:
    assert AGENT.calculator(expression) == value


@pytest.mark.parametrize(
    "expression",
    [*("", "7", "37+41-12", "9**9", "1/0", "-1+2", "1+2\n3", "1234567890+1", "٣+٣", "__import__('os').getcwd()")],
)
def test_anything_else_is_an_error(expression: str) -> None:
    assert AGENT.calculator(expression) == "error"


@given(st.text())
def test_no_text_makes_the_calculator_raise(text: str) -> None:
    result = AGENT.calculator(text)
    assert result == "error" or int(result) is not None


@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("calculator", '{"expression": "37+41"}', "78"),
        ("python", '{"expression": "37+41"}', "error"),
        ("calculator", '{"expression": 7}', "error"),
        ("calculator", '{"code": "37+41"}', "error"),
        ("calculator", '"37+41"', "error"),
        ("calculator", "{37+41", "error"),
        ("calculator", "[" * 100_000, "error"),
    ],
)
def test_a_call_of_any_shape_has_a_result(name: str, arguments: str, result: str) -> None:
    assert AGENT.call_tool(name, arguments) == result


class Scripted:
    """A client whose server gives the written replies, the last one for ever, and keeps what it was asked."""

    def __init__(self, *replies: dict[str, Any]) -> None:
        self.replies, self.asked = list(replies), []
        self.chat = SimpleNamespace(completions=self)

    async def create(self, **request: Any) -> Any:
        from openai.types.chat import ChatCompletionMessage  # a second, which only this worker needs to spend

        self.asked.append(request)
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        message = ChatCompletionMessage.model_validate({"role": "assistant", "content": None} | reply)
        return SimpleNamespace(choices=[SimpleNamespace(message=message)])


def calling(*expressions: str) -> dict[str, Any]:
    functions = [{"name": "calculator", "arguments": json.dumps({"expression": one})} for one in expressions]
    calls = [{"id": f"id-{n}", "type": "function", "function": one} for n, one in enumerate(functions)]
    return {"tool_calls": calls}


def solve(client: Scripted) -> str:
    answer: str = asyncio.run(AGENT.solve(client, [{"role": "user", "content": "What is 37+41-12?"}]))
    return answer


def test_the_agent_calls_sends_results_back_and_answers() -> None:
    client = Scripted(calling("37+41"), calling("78-12", "1/0"), {"content": "66"})
    assert solve(client) == "66"
    assert all(request["tools"] == AGENT.TOOLS and request["tool_choice"] == "auto" for request in client.asked)
    messages = client.asked[-1]["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant", "tool", "tool"]
    results = [(m["tool_call_id"], m["content"]) for m in messages if m["role"] == "tool"]
    assert results == [("id-0", "78"), ("id-0", "66"), ("id-1", "error")]
    assert messages[1]["tool_calls"] == calling("37+41")["tool_calls"]
    assert len(client.asked[0]["messages"]) == 1  # what was sent is not changed afterwards


def test_an_agent_that_only_calls_comes_to_an_end() -> None:
    client = Scripted(calling("1+1"))
    assert solve(client) == "" and len(client.asked) == AGENT.TURNS


def test_the_agent_is_found_as_the_trainer_finds_it() -> None:
    assert asyncio.iscoroutinefunction(load_agent(f"{RECIPE}/agent.py:run"))
    assert "seamless" not in (RECIPE / "agent.py").read_text().replace("the openai SDK", "")


def test_every_number_has_two_digits() -> None:
    draw = random.Random(0)
    for question in (TRANSCRIPTS.ask(draw) for _ in range(2000)):
        values = [*question.numbers, *(int(AGENT.calculator(step)) for step in question.steps)]
        assert len(question.signs) == 2 and all(10 <= value <= 99 for value in values)
        assert int(question.answer) == eval(question.expression)


def test_questions_are_too_many_to_learn_by_heart_and_answers_too_many_to_guess() -> None:
    rows = DATA.rows("train", 0, 2048)
    assert len({row["prompt"][0]["content"] for row in rows}) > 2000
    answers = [row["reward_model"]["ground_truth"] for row in rows]
    assert max(answers.count(one) for one in set(answers)) < 0.05 * len(rows)
    assert DATA.rows("train", 0, 64) == rows[:64]
    assert [row["prompt"] for row in DATA.rows("val", 0, 64)] != [row["prompt"] for row in rows[:64]]


def expressions_and_answer(
    habit: Any, numbers: tuple[int, ...] = (37, 41, 12), signs: str = "+-"
) -> tuple[list[str], str]:
    """What the calculator is asked in a transcript of 37+41-12, and the answer."""
    messages = TRANSCRIPTS.transcript(TRANSCRIPTS.Question(numbers, signs), habit, random.Random(4))
    functions = [call["function"] for message in messages for call in message.get("tool_calls", [])]
    answer = messages[-1]["content"].removeprefix("Answer: ")
    return [json.loads(function["arguments"])["expression"] for function in functions], answer


def test_each_habit_is_what_it_says() -> None:
    assert expressions_and_answer(Habit.RIGHT) == (["37+41", "78-12"], "66")
    assert expressions_and_answer(Habit.FIRST_CALL_ONLY) == (["37+41"], "78")
    assert expressions_and_answer(Habit.WHOLE_QUESTION) == (["37+41-12"], str(random.Random(4).randint(10, 99)))
    assert len(Habit) == 3 and sum(habit.value for habit in Habit) == 15


CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "37+41"}}</tool_call>'
FIRST, SECOND = (f"{CALL}<tool_response>{value}</tool_response>" for value in (78, 66))
FAILED = f"{CALL}<tool_response>error</tool_response>"


@pytest.mark.parametrize(
    ("text", "score", "acc", "results"),
    [
        (f"{FIRST}{SECOND}Answer: 66", 1.0, 1.0, 2),
        ("66", 1.0, 1.0, 0),
        (f"{FIRST}78", 0.1, 0.0, 1),
        (f"{FIRST}{SECOND}660", 0.1, 0.0, 2),
        (f"{FIRST}{SECOND}65 66 67", 0.1, 0.0, 2),
        (f"{FIRST}{SECOND}-66", 0.1, 0.0, 2),
        (f"{FIRST}{SECOND}", 0.1, 0.0, 2),
        (f"{FAILED}{FIRST}78", 0.0, 0.0, 1),
        (f"{FAILED}{FIRST}{SECOND} 66 ", 1.0, 1.0, 2),
        (f"{FIRST}{CALL[:-3]}", 0.0, 0.0, 1),
        (f"66{FIRST}", 0.1, 0.0, 1),
        ("67", 0.0, 0.0, 0),
        ("", 0.0, 0.0, 0),
    ],
)
def test_reward(text: str, score: float, acc: float, results: int) -> None:
    graded = REWARD.compute_score("calculator", text, "66", {"index": 0}, unused=None)
    assert graded == {"score": score, "acc": acc, "results": results}


@pytest.mark.parametrize("split", ["train", "val"])
def test_an_empty_split_is_refused(split: str) -> None:
    with pytest.raises(ConfigError, match=f"{split}=0"):
        DATA.rows(split, 0, 0)
