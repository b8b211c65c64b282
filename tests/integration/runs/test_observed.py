"""A run whose metrics Prometheus scrapes while it trains, and whose sessions are traced."""

from __future__ import annotations

import re
import socket
import time
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.job import AGENT, Job
from support.job_ends import leftovers

pytestmark = [pytest.mark.integration, pytest.mark.long]
STEPS = 4
READY = re.compile(r"Metrics for Prometheus are at http://[^:]+:(\d+)/metrics")
Found = dict[str, dict[tuple[tuple[str, str], ...], float]]


def scrape(port: int) -> Found:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as reply:
        text = reply.read().decode()
    found: Found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            of_name = found.setdefault(sample.name, {})
            labels = tuple(sorted(sample.labels.items()))
            assert labels not in of_name, "a series is there twice"
            of_name[labels] = sample.value
    return found


def scrapes(job: Job) -> list[Found]:
    """What the run served, asked once a second from its first address to its end."""
    job.wait_for("Metrics for Prometheus are at")
    match = READY.search(job.log())
    assert match and job.process
    port, found = int(match[1]), list[Found]()
    while job.process.poll() is None:
        try:
            found.append(scrape(port))
        except OSError:  # the run ends
            if job.process.poll() is None and "step:4 " not in job.log():
                raise
        time.sleep(1)
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), 1)
    return found


def test_a_run_is_scraped_while_it_trains(nano: Path, tmp_path: Path) -> None:
    job = Job(tmp_path, nano, {**AGENT, "seamless__metrics_port": 0, "trainer__total_training_steps": STEPS}).start()
    found = scrapes(job)
    job.finish()
    assert leftovers(job) == []
    assert len(found) > STEPS
    live = [one for one in found if one["seamless_data_plane_up"][()]]
    assert len(live) > STEPS, "data planes reply while they start, load weights and train"
    begun = [one["seamless_calls_begun_total"][()] for one in live]
    assert begun == sorted(begun) and len(set(begun)) > 2, "counts are those of the moment, and only grow"
    last, steps = live[-1], job.metrics()
    replica = (("replica", "replica-0"),)
    assert last["seamless_replica_generated_tokens_total"][replica] > 0 < last["seamless_replica_slots"][replica]
    assert last["seamless_fleet_replicas"].keys() > {(("state", "serving"),), (("state", "dead"),)}
    shown = last["seamless_training_global_step"][()]
    assert shown in (STEPS - 1, STEPS)
    assert last["seamless_critic_score_mean"][()] == pytest.approx(steps[int(shown)]["critic/score/mean"])
    assert last["seamless_timing_step_seconds"][()] > 0
    assert sum(last["seamless_device_time_ratio"].values()) == pytest.approx(1, abs=0.01)
