"""More calls than one batch of verl's usual size keeps open: a command of the trainer never waits behind them."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import ray
from support.plane import plane

pytestmark = [pytest.mark.integration, pytest.mark.long]
CALLS, ROUNDS = 20_000, 15
PAUSE_S = 0.3


@pytest.mark.timeout(300)
def test_a_pause_takes_effect_at_once_with_twenty_thousand_open_calls(nano: Path, tmp_path: Path) -> None:
    with plane(nano / "model", tmp_path, replicas=1, delay_s=0.5) as running:
        running.commit(1)
        open_calls = [
            running.first.generate.remote(f"call-{number}", [number % 100, 2, 3], {"max_tokens": 1000})
            for number in range(CALLS)
        ]
        while ray.get(running.first.checked_metrics.remote())["calls/running"] < CALLS:
            pass  # bounded by the test's own timeout
        took = []
        for _ in range(ROUNDS):
            began = time.monotonic()
            ray.get(running.first.execute.remote("pause", running.names))
            took.append(time.monotonic() - began)
            assert ray.get(running.servers[0].status.remote())[1] == "keep"
            ray.get(running.first.execute.remote("resume", running.names))
        took.sort()
        sys.stdout.write(f"\n{CALLS} open calls: a pause takes {took[ROUNDS // 2]:.3f} s, at most {took[-1]:.3f} s\n")
        assert took[ROUNDS // 2] < PAUSE_S
        del open_calls
