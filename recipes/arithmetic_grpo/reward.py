"""The reward of the arithmetic recipe: mostly for the right number, a little for coming near it."""

from __future__ import annotations

import re
from typing import Any

NUMBER = re.compile(r"[0-9]+")


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, float]:
    found = NUMBER.search(solution_str)
    if found is None:
        return {"score": 0.0, "acc": 0.0}
    if solution_str == ground_truth:
        return {"score": 1.0, "acc": 1.0}
    score = 0.05
    if found.start() == 0:
        score += 0.05
        off = abs(int(found[0][:4]) - int(ground_truth))
        score += 0.3 * max(0.0, 1 - off / 5)
        if found.end() == len(solution_str):
            score += 0.1
    return {"score": score, "acc": 0.0}
