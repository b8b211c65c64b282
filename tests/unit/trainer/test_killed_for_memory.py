"""An actor that Ray's memory monitor has killed is dead for those who ask it for what it does."""

from __future__ import annotations

from typing import Any

import pytest
from support.actor_death import KILLED, actor, killed_for_memory, replies_raise

from seamless_verl.trainer.device_time import LostSource, reply_or_loss
from seamless_verl.trainer.run_waits import RunWaits


@pytest.fixture(autouse=True)
def killed(monkeypatch: pytest.MonkeyPatch) -> None:
    replies_raise(monkeypatch, killed_for_memory())


def test_it_is_a_lost_source_of_device_time(caplog: pytest.LogCaptureFixture) -> None:
    assert reply_or_loss("replica-0", object()) == LostSource("replica-0")
    assert caplog.messages == [f"replica-0 is dead and reports no more activity: {KILLED}"]


def test_it_is_not_among_those_that_say_what_they_wait_for() -> None:
    parts: dict[str, Any] = {"planes": dict, "workers": dict, "silent_s": dict, "training": list}
    waits = RunWaits(stage=lambda: ("", 0.0), commit=lambda: None, outstanding=list, **parts)
    assert waits._ask({"agent loop worker 0": actor("waits")}) == {}
    assert waits._silent() == {}
