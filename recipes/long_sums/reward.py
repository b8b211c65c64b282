"""The reward of long sums: 1 for the right answer, to the last character, and 0 for any other."""

from __future__ import annotations

from typing import Any


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, float]:
    """Grades one response; the signature is verl's custom reward function.

    Returns `score`, the reward, `acc`, the same, which verl reports as `val-core/long_sums/acc`, and `right_share`, the
    share of the answer that is right from its beginning on.
    """
    right = float(solution_str == ground_truth)
    steps, wanted = solution_str.split(" "), ground_truth.split(" ")
    led = next((i for i, (a, b) in enumerate(zip(steps, wanted, strict=False)) if a != b), min(len(steps), len(wanted)))
    return {"score": right, "acc": right, "right_share": led / len(wanted)}
