"""The reward of the mathematics recipe: 1 for the right final answer, 0 for any other.

verl's own grader of DAPO's data reads the last line `Answer: ...` of a reply. Change `compute_score` for other data.
"""

from __future__ import annotations

from typing import Any

from verl.utils.reward_score import math_dapo


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, float]:
    """Grades one reply; the signature is verl's custom reward function. Returns `score` and `acc`, 0.0 or 1.0."""
    right = float(bool(math_dapo.compute_score(solution_str, ground_truth)["acc"]))
    return {"score": right, "acc": right}
