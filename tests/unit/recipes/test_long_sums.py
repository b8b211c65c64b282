"""Long sums: what is asked, how it is written out, and what is rewarded."""

from __future__ import annotations

import random
import statistics

import pytest
from support.recipes import RECIPES, load

RECIPE = RECIPES / "long_sums"
SUMS, DATA, REWARD = load(RECIPE, "sums", "data", "reward")


def test_an_answer_by_hand() -> None:
    question = SUMS.Question(30, 37, 45)
    assert question.text == "<30 37 45"
    # 37 + 45 = 82, 45 + 82 = 127, of which 27 is left, and below 30
    assert question.answer == "37+45:12,08 45+82:07,12"


def test_a_chain_goes_on_until_a_result_is_below_the_bound() -> None:
    draw = random.Random(0)
    for _ in range(200):
        question = SUMS.ask(draw)
        results = [int(step[-1]) * 10 + int(step[7]) for step in question.steps]
        assert results[-1] < question.bound <= min([*results[:-1], 99])
        assert results[0] == (question.first + question.second) % 100


def test_a_careless_answer_goes_on_from_its_mistakes() -> None:
    question, wrong = SUMS.Question(30, 37, 45), iter([3, 8, 5, 0])
    # 83 is written for 37 + 45, and then 05 for 45 + 83, which is below the bound; the carries are right
    assert question.written(lambda digit: next(wrong)) == ["37+45:13,08", "45+83:05,10"]


def test_mistakes_are_as_frequent_as_asked() -> None:
    draw = random.Random(2)
    questions = [SUMS.ask(draw) for _ in range(2000)]
    short = [question for question in questions if len(question.steps) == 1]
    right = sum(SUMS.careless_answer(question, draw, 0.1) == question.answer for question in short) / len(short)
    assert len(short) > 200 and right == pytest.approx(0.91**2, abs=0.08)  # a random digit is right one time in ten
    assert all(SUMS.careless_answer(question, draw, 0.0) == question.answer for question in short)


def test_most_answers_are_short_and_a_few_very_long() -> None:
    draw = random.Random(1)
    lengths = sorted(len(SUMS.ask(draw).answer) for _ in range(2000))
    assert lengths[0] == 11 and lengths[-1] > 550
    assert 40 < statistics.median(lengths) < 90 and lengths[1800] > 180
    assert lengths[-1] < SUMS.LONGEST * 12


def test_a_longer_list_of_rows_begins_with_the_shorter() -> None:
    assert DATA.rows("train", 0, 5) == DATA.rows("train", 0, 9)[:5]
    assert DATA.rows("train", 0, 5) != DATA.rows("val", 0, 5)
    assert DATA.rows("train", 0, 5) != DATA.rows("train", 1, 5)


RIGHT = "37+45:12,08 45+82:07,12"


@pytest.mark.parametrize(
    ("reply", "score", "right_share"),
    [
        (RIGHT, 1.0, 1.0),
        ("37+45:12,08", 0.0, 0.5),
        ("37+45:12,09 45+82:07,12", 0.0, 0.0),
        (f"{RIGHT} 82+27:09,10", 0.0, 1.0),
        (f"{RIGHT} ", 0.0, 1.0),
        ("", 0.0, 0.0),
    ],
)
def test_only_the_whole_answer_is_rewarded(reply: str, score: float, right_share: float) -> None:
    found = REWARD.compute_score("long_sums", reply, RIGHT)
    assert found == {"score": score, "acc": score, "right_share": right_share}
