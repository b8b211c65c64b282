"""A reward with a gradient at every step: the share of ASCII characters, and one for the right answer."""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, **kwargs: Any) -> float:
    share = sum(character.isascii() for character in solution_str) / max(1, len(solution_str))
    return 1.0 if solution_str.strip() == ground_truth else 0.5 * share
