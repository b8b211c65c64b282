"""What is usual between trainer and engines, and what is said of a difference that is not."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from seamless_verl.trainer import mismatch
from seamless_verl.trainer.mismatch import ENGINE, LEAST, MOST, RECORD, Band, Mismatch, RereadRequest, StoredSample

pytestmark = pytest.mark.integration
SAMPLE = StoredSample("prompt_0_0", [1, 2, 3, 4], np.zeros(2, np.float32), np.array([3, 4]), np.array([True, True]))


def judged(checks: list[tuple[str, float, float | None]]) -> tuple[list[float], Mismatch]:
    """Whether each of these was usual, given a replica's name, and the means of trainer and of its record."""
    judge = Mismatch(dict, list)
    usual = []
    for replica, mean, record in checks:
        judge.asked = RereadRequest(1, replica, SAMPLE, None)
        judge.record = {} if record is None else {f"{RECORD}mean": record}
        usual.append(judge.judge({f"{ENGINE}mean": mean})["seamless/agreement/usual"])
    return usual, judge


def test_a_run_learns_what_is_usual_and_says_a_difference_once() -> None:
    band = Band()
    assert [band.leaves(0.02) for _ in range(8)] == [False] * 8
    assert band.limit() == pytest.approx(0.08)
    assert [band.leaves(mean) for mean in (0.079, 0.09, 0.5, 0.02, 0.09)] == [False, True, False, False, True]


def test_what_no_precision_makes_is_never_learned_and_what_any_makes_never_said() -> None:
    band = Band()
    assert band.leaves(MOST * 1.01) and not band.seen and band.limit() == MOST
    band = Band()
    assert not any(band.leaves(1e-6) for _ in range(8)) and band.limit() == LEAST and not band.leaves(LEAST)


@pytest.mark.parametrize(
    ("checks", "likely"),
    [
        ([("a", 0.5, None)], mismatch.FIRST),
        ([("a", 1e-3, None), ("b", 0.5, None)], mismatch.ANOTHER),
        ([("a", 1e-3, None), ("b", 1e-3, None), ("a", 0.5, None), ("b", 0.5, None)], mismatch.ANOTHER),
        ([("a", 0.5, None), ("a", 1e-3, None), ("a", 0.5, None)], mismatch.FIRST),
        ([("a", 1e-3, 1e-3), ("a", 1e-3, 0.6)], mismatch.SAMPLING),
    ],
    ids=["first", "one of two", "one, then both", "alone", "record"],
)
def test_the_cause_is_found_by_elimination(
    caplog: pytest.LogCaptureFixture, checks: list[tuple[str, float, float | None]], likely: str
) -> None:
    with caplog.at_level(logging.WARNING):
        usual, _ = judged(checks)
    assert (
        usual[-1] == 0
        and likely in caplog.text
        and caplog.text.count("Likely") == usual.count(0) - (usual[-2:] == [0, 0])
    )


def test_the_engines_record_is_judged_by_tokens_of_the_same_version_alone() -> None:
    """Of the two tokens the second is of version 4; the trainer's own figure is then the workers'."""
    judge = Mismatch(dict, list)
    judge.asked = RereadRequest(4, "a", SAMPLE, None)
    judge._read = lambda: np.array([-9.0, -7.0, -0.25], np.float32)  # type: ignore[method-assign]
    assert judge.reply(4, ["prompt_0_0"]) == '{"prompt_0_0": [-7.0, -0.25]}'
    assert judge.record == {f"{RECORD}tokens": 1.0, f"{RECORD}mean": 0.25, f"{RECORD}max": 0.25}
    assert judge.reply(4, ["another_0_0"]) == "" and judge.record == {}
    assert judge.reply(5, ["prompt_0_0"]) == "", "of another version"
