"""The reward of the arithmetic recipe: mostly for the right number, a little for approaching it.

A model with random weights almost never gives the right answer, so partial rewards lead it there: something for
beginning with a digit, more for coming within two of the sum, and a little for stopping soon after the number. Every
wrong answer scores at most 0.35 and every right one at least 0.8, so that no wrong answer pays.
"""

from __future__ import annotations

import re
from typing import Any

NUMBER = re.compile(r"[0-9]+")

RIGHT, DIGIT, NEAR, SHORT = 0.8, 0.1, 0.2, 0.2
"""For the sum; for any number; for a near miss; for a short reply (half of it when the number is wrong)."""

REACH = 3
"""A number at this distance from the sum, or a larger one, is no near miss."""


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, float]:
    """Grades one response by the number it begins with; the signature is verl's custom reward function.

    Returns `score` in [0, 1], the reward, and `acc`, 1.0 when that number is the sum and 0.0 otherwise,
    which verl reports as `val-core/<data_source>/acc`.
    """
    number = NUMBER.match(solution_str)
    if number is None:
        return {"score": 0.0, "acc": 0.0}
    brevity = SHORT / len(solution_str)
    if number[0] == ground_truth:
        return {"score": RIGHT + brevity, "acc": 1.0}
    return {"score": DIGIT + NEAR * _nearness(number[0], ground_truth) + brevity / 2, "acc": 0.0}


def _nearness(number: str, ground_truth: str) -> float:
    """From 1 for the sum down to 0 at a distance of `REACH`; digits are cut because `int` refuses very long numbers."""
    return max(0.0, 1 - abs(int(number[:4]) - int(ground_truth)) / REACH)
