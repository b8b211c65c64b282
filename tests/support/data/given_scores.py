"""What users' reward functions and agents may give as a score: each value, and the number that it is; None: it is none.

`compute_score` is a reward function that gives them in turn, every third of them one that is no number, with values
beside the score that no average can be made of.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from itertools import count
from typing import Any

import numpy as np
import torch


def raising() -> Any:
    raise RuntimeError("the judge is away")


BESIDE = {"parts": [1, {"a": "b"}], "why": "text", "lost": float("nan"), "seen": np.float32(0.25), "none": None}
SCORES: dict[str, tuple[Callable[[], Any], float | None]] = {
    "bool": (lambda: True, 1.0),
    "numpy's bool": (lambda: np.True_, 1.0),
    "int": (lambda: 2, 2.0),
    "float": (lambda: -0.5, -0.5),
    "numpy's float32": (lambda: np.float32(0.5), 0.5),
    "numpy's int64": (lambda: np.int64(3), 3.0),
    "array without dimensions": (lambda: np.array(0.5), 0.5),
    "array of one": (lambda: np.array([0.5]), 0.5),
    "tensor without dimensions": (lambda: torch.tensor(0.5), 0.5),
    "tensor of one": (lambda: torch.tensor([0.5], dtype=torch.bfloat16), 0.5),
    "Decimal": (lambda: Decimal("0.5"), 0.5),
    "Fraction": (lambda: Fraction(1, 2), 0.5),
    "dict": (lambda: {"score": np.float32(0.5), **BESIDE}, 0.5),
    "None": (lambda: None, None),
    "NaN": (lambda: float("nan"), None),
    "infinity": (lambda: float("-inf"), None),
    "Decimal's NaN": (lambda: Decimal("NaN"), None),
    "tensor of NaN": (lambda: torch.tensor(float("nan")), None),
    "text": (lambda: "0.5", None),
    "bytes": (lambda: b"0.5", None),
    "complex": (lambda: 0.5 + 0j, None),
    "beyond float32": (lambda: 1e39, None),
    "beyond float": (lambda: 10**400, None),
    "longer than Python writes": (lambda: 10**5000, None),
    "list": (lambda: [0.5], None),
    "array of two": (lambda: np.array([0.5, 0.5]), None),
    "dict without a score": (lambda: {"points": 1, **BESIDE}, None),
    "dict with None": (lambda: {"score": None, **BESIDE}, None),
    "dict with a text": (lambda: {"score": "high", **BESIDE}, None),
    "what cannot be sent": (lambda: (lock for lock in ()), None),
    "an error": (raising, None),
}
NONE = [make for make, number in SCORES.values() if number is None]
NUMBERS = [make for make, number in SCORES.values() if number is not None]
calls = count()


def compute_score(data_source: str, solution_str: str, ground_truth: str, **kwargs: Any) -> Any:
    """Whatever is next; a number varies with the answer, so that a group learns from it."""
    call = next(calls)
    if call % 3 == 0:
        return NONE[call // 3 % len(NONE)]()
    if call % 3 == 1:
        return NUMBERS[call // 3 % len(NUMBERS)]()
    return {"score": sum(map(str.isascii, solution_str)) / max(1, len(solution_str)), **BESIDE}
