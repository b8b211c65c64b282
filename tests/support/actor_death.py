"""What Ray raises for a call of an actor that its memory monitor has killed, and calls that end with an error."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray

USE = "Memory on the node (IP: 10.0.50.112, ID: 4cb25bc0) was 28.62GB used / 30.00GB limit (0.954017)"
KILLED = f"it was killed: its node was short of memory. {USE}"
TEXT = (
    f"1 worker(s) were killed due to the node running low on memory. {USE}; OOM kill reason: above the threshold; "
    "Top 10 memory users: PID MEM(GB) COMMAND; 7 9.01 python\nRefer to the documentation on how to address it"
)


def killed_for_memory() -> ray.exceptions.OutOfMemoryError:
    """As Ray 2.60 writes it."""
    return ray.exceptions.OutOfMemoryError(TEXT)


def unavailable() -> ray.exceptions.ActorUnavailableError:
    return ray.exceptions.ActorUnavailableError("the network was away", None)


def replies_raise(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Every reply of Ray is there, and is this error."""

    def get(reply: Any, timeout: float | None = None) -> Any:
        raise error

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", lambda replies, num_returns=1, timeout=None: (list(replies), []))


def actor(*methods: str) -> Any:
    """An actor whose methods may be called; each call has a reply of its own."""
    return SimpleNamespace(**{method: SimpleNamespace(remote=lambda *_: object()) for method in methods})
