"""A kind of failure that is frequent is said once, and ends a run that is told so."""

from __future__ import annotations

import pytest

from seamless_verl.errors import SessionsFailedError
from seamless_verl.trainer.failure_shares import FailureShares

A_STEP = 40  # sessions


def counts(step: int, failed: float, kind: str = "tool_failed") -> dict[str, float]:
    """As the data plane counts: of the whole run."""
    return {"sessions/ended": step * A_STEP, "sessions/failed": failed, f"sessions/failed/{kind}": failed, "other": 1.0}


def test_a_share_above_a_fifth_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    shares = FailureShares(None)
    for step in range(1, 20):
        shares.step_ended(counts(step, 8.0 * step))
    assert caplog.messages == [], "a fifth is not above it"
    for step in range(20, 30):
        shares.step_ended(counts(step, 8.0 * 19 + 10 * (step - 19)))
    (line,) = caplog.messages
    assert line.startswith("42 of the 200 sessions of the last 5 steps ended as tool_failed.")


def test_the_first_steps_alone_are_too_few_to_say(caplog: pytest.LogCaptureFixture) -> None:
    shares = FailureShares(0.5)
    for step in range(1, 5):
        shares.step_ended(counts(step, A_STEP * step))
    assert caplog.messages == []
    with pytest.raises(SessionsFailedError, match="200 of the 200"):
        shares.step_ended(counts(5, A_STEP * 5))


def test_a_data_plane_that_counts_anew_begins_the_steps_anew(caplog: pytest.LogCaptureFixture) -> None:
    shares = FailureShares(None)
    for step in [*range(1, 10), *range(1, 5)]:
        shares.step_ended(counts(step, 0.0))
    for step in range(5, 7):
        shares.step_ended(counts(step, 12.0 * (step - 4)))
    assert caplog.messages == []
    shares.step_ended(counts(7, 48.0))
    assert caplog.messages[0].startswith("48 of the 200")


def test_a_run_without_counts_fails_nowhere() -> None:
    shares = FailureShares(0.1)
    for _ in range(10):
        shares.step_ended({"calls/begun": 1.0})
