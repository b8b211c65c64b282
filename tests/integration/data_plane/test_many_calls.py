"""More calls than one batch of verl's usual size keeps open: a command of the trainer never waits behind them."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import ray
from support.client_calls import KINDS, generate
from support.plane import plane

pytestmark = [pytest.mark.integration, pytest.mark.long]
OF_A_KIND, ROUNDS = 5_000, 15
CALLS = OF_A_KIND * len(KINDS)
PAUSE_S = 0.3


@pytest.mark.timeout(300)
def test_a_pause_takes_effect_at_once_with_twenty_thousand_open_calls(nano: Path, tmp_path: Path) -> None:
    with plane(nano / "model", tmp_path, replicas=1, delay_s=0.5) as running:
        running.commit(1)
        calling = ray.remote(generate).options(num_cpus=0).remote(running.config, OF_A_KIND)
        while ray.get(running.first.checked_metrics.remote())["calls/running"] < CALLS:
            pass  # bounded by the test's own timeout
        took = []
        for version in range(2, 2 + ROUNDS):
            began = time.monotonic()
            ray.get(running.first.execute.remote("pause", running.names))
            took.append(time.monotonic() - began)
            assert ray.get(running.servers[0].status.remote())[1] == "keep"
            running.commit(version)
        took.sort()
        sys.stdout.write(f"\n{CALLS} open calls: a pause takes {took[ROUNDS // 2]:.3f} s, at most {took[-1]:.3f} s\n")
        assert took[ROUNDS // 2] < PAUSE_S
        del calling
