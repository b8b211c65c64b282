"""The reward of reward.py, which comes only when a file is gone: a test holds training back by it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import reward


def compute_score(data_source: str, solution_str: str, ground_truth: str, **kwargs: Any) -> float:
    while Path(os.environ["HELD_WHILE_EXISTS"]).exists():
        time.sleep(0.1)
    return reward.compute_score(data_source, solution_str, ground_truth, **kwargs)
