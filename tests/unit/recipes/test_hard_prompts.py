"""Sums of three difficulties: what is asked, and in which order."""

from __future__ import annotations

from collections import Counter

from support.recipes import RECIPES, load

from seamless_verl.tiny.task import arithmetic_rows

SUMS, DATA = load(RECIPES / "hard_prompts", "sums", "data")
(REWARD,) = load(RECIPES / "arithmetic_grpo", "reward")


def test_a_third_is_of_each_difficulty_and_the_easy_ones_are_arithmetics() -> None:
    rows = DATA.rows("train", 0, 300)
    assert Counter(row["extra_info"]["difficulty"] for row in rows) == dict.fromkeys(SUMS.DIFFICULTIES, 100)
    easy = [row["prompt"] for row in rows if row["extra_info"]["difficulty"] == "easy"]
    assert easy == [row["prompt"] for row in arithmetic_rows("train", 0, 100)]


def test_longer_sums_have_two_digits_first_and_the_right_answer() -> None:
    for question in SUMS.questions("train", 1, 600):
        first, second = map(int, question.text.removesuffix("=").split("+"))
        assert int(question.answer) == first + second
        assert (first >= 10) == (question.difficulty != "easy")
        assert second <= {"easy": 9, "middle": 9, "hard": 99}[question.difficulty]
    assert max(len(question.answer) for question in SUMS.questions("train", 1, 600)) == 3


def test_a_longer_list_of_rows_begins_with_the_shorter() -> None:
    assert DATA.rows("train", 0, 5) == DATA.rows("train", 0, 9)[:5]
    assert DATA.rows("train", 0, 5) != DATA.rows("val", 0, 5)
    assert DATA.rows("train", 0, 5) != DATA.rows("train", 1, 5)


def test_every_right_answer_counts_as_right_and_no_wrong_one() -> None:
    """The recipe's `seamless.sampler.success` is between the two."""
    for question in SUMS.questions("train", 2, 300):
        right = int(question.answer)
        scores = {
            value: REWARD.compute_score("x", str(value), question.answer)["score"] for value in (right, right + 1)
        }
        assert scores[right] >= 0.8 > scores[right + 1] > 0
