"""Reward functions that end a run, or fill its console; the file that ENDS_WHEN names says when."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any

from reward import compute_score


def is_due() -> bool:
    return os.path.exists(os.environ["ENDS_WHEN"])


def exits(*args: Any, **kwargs: Any) -> float:
    if is_due():
        os._exit(3)
    return compute_score(*args, **kwargs)


def raises(*args: Any, **kwargs: Any) -> float:
    if is_due():
        raise ZeroDivisionError("no reward for this")
    return compute_score(*args, **kwargs)


def prints(*args: Any, **kwargs: Any) -> float:
    with suppress(FileNotFoundError):
        os.unlink(os.environ["ENDS_WHEN"])
        sys.stdout.write("x" * 10_000_000 + "\n")
        sys.stdout.flush()
    return compute_score(*args, **kwargs)
