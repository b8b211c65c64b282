"""The reward: 1 if the last number of a reply is the answer, else 0."""

from __future__ import annotations

import re
from typing import Any

NUMBER = re.compile(r"-?[0-9]+")


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **kwargs: Any
) -> float:
    """Grades one response; the signature is verl's custom reward function."""
    return float(NUMBER.findall(solution_str)[-1:] == [ground_truth])
