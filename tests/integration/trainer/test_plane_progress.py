"""What the watchdog sees of calls that generate: over several data planes, of which some do not reply."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray

from seamless_verl.trainer import run_waits
from seamless_verl.trainer.run_waits import PlaneProgress

pytestmark = pytest.mark.integration


class Plane:
    """`replies` are what it says to one question after the other; None is no reply, and it is asked no more then."""

    def __init__(self, *replies: Any) -> None:
        self.replies = list(replies)
        self.progress = SimpleNamespace(remote=lambda: Reply(self.replies.pop(0)))


class Reply:
    def __init__(self, value: Any) -> None:
        self.value = value


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(replies: list[Reply], num_returns: int, timeout: float) -> tuple[list[Reply], list[Reply]]:
        return [one for one in replies if one.value is not None], []

    def get(reply: Reply) -> float:
        if isinstance(reply.value, Exception):
            raise reply.value
        return float(reply.value)

    monkeypatch.setattr(run_waits, "ray", SimpleNamespace(wait=wait, get=get, exceptions=ray.exceptions))


def test_calls_of_any_data_plane_are_progress() -> None:
    count = PlaneProgress([Plane(5, 5, 5), Plane(1, 2, 3)])
    assert [count(), count(), count()] == [6, 7, 8]


def test_one_that_does_not_reply_hides_nothing_of_the_others() -> None:
    count = PlaneProgress([Plane(None), Plane(1, 2), Plane(4, ray.exceptions.ActorUnavailableError("", b"x" * 16))])
    assert [count(), count()] == [5, 6]


def test_before_the_first_reply_nothing_is_known() -> None:
    late = Plane(None, 3)
    count = PlaneProgress([late])
    assert count() is None
    (reply,) = count.asked.values()
    reply.value = 2  # type: ignore[attr-defined]
    assert count() == 2 and not late.replies[1:], "the same question"
