"""The bench's reward: the share of digits among the characters of a response.

Lengths are forced, so there is nothing to solve; this one has a gradient from the first step and costs the
same in every arm.
"""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, **kwargs: Any) -> float:
    """verl's custom reward function; a score in [0, 1]."""
    return sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))
