"""verl's timers tell what they measured, and this process keeps nothing of it."""

from __future__ import annotations

import pytest

from seamless_verl.agent_loops.unkept_timings import keep_no_timings


def measured() -> tuple[dict[str, float], int]:
    """What verl has of a hundred measurements, and how many the process keeps."""
    from codetiming import Timer
    from verl.utils.profiler import simple_timer

    found: dict[str, float] = {}
    for _ in range(100):
        with simple_timer("compute_score", found):
            pass
    return found, sum(len(values) for values in Timer.timers._timings.values())


def test_a_timer_keeps_each_measurement_unless_it_is_told_not_to(monkeypatch: pytest.MonkeyPatch) -> None:
    from codetiming import Timer
    from codetiming._timers import Timers

    monkeypatch.setattr(Timer, "timers", Timers())
    assert measured()[1] == 100, "codetiming keeps none by itself: take agent_loops/unkept_timings.py out"
    keep_no_timings()
    found, kept = measured()
    assert kept == 0 and found["compute_score"] > 0
