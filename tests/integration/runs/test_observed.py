"""A run whose metrics Prometheus scrapes while it trains, and whose sessions are traced."""

from __future__ import annotations

import hashlib
import re
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from prometheus_client.parser import text_string_to_metric_families
from support.job import AGENT, Job
from support.job_ends import leftovers

from seamless_verl.journal import JournalReader

pytestmark = [pytest.mark.integration, pytest.mark.long]
STEPS, PROMPTS, SAMPLES = 4, 8, 4
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


class Receiver(ThreadingHTTPServer):
    """Receives what an exporter sends by OTLP over HTTP; `spans` by trace id."""

    def __init__(self) -> None:
        self.spans: dict[bytes, list[Span]] = {}
        super().__init__(("127.0.0.1", 0), Received)


class Received(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        assert self.path == "/v1/traces"
        data = self.rfile.read(int(self.headers["content-length"]))
        for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
            for span in (span for scope in resource.scope_spans for span in scope.spans):
                self.server.spans.setdefault(span.trace_id, []).append(span)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_run_is_scraped_while_it_trains_and_its_sessions_are_traced(
    nano: Path, tmp_path: Path, receiver: Receiver
) -> None:
    options = {**AGENT, "seamless__metrics_port": 0, "trainer__total_training_steps": STEPS}
    options["actor_rollout_ref__rollout__agent__default_agent_loop"] = "traced"
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{receiver.server_port}"}
    job = Job(tmp_path, nano, options, env).start()
    found = scrapes(job)
    job.finish()
    assert leftovers(job) == []
    check_metrics(found, job.metrics())
    check_traces(receiver.spans, job)


def check_metrics(found: list[Found], steps: dict[int, dict[str, float]]) -> None:
    assert len(found) > STEPS
    live = [one for one in found if one["seamless_data_plane_up"][()]]
    assert len(live) > STEPS, "data planes reply while they start, load weights and train"
    begun = [one["seamless_calls_begun_total"][()] for one in live]
    assert begun == sorted(begun) and len(set(begun)) > 2, "counts are those of the moment, and only grow"
    last = live[-1]
    replica = (("replica", "replica-0"),)
    assert last["seamless_replica_generated_tokens_total"][replica] > 0 < last["seamless_replica_slots"][replica]
    assert last["seamless_fleet_replicas"].keys() > {(("state", "serving"),), (("state", "dead"),)}
    shown = last["seamless_training_global_step"][()]
    assert shown in (STEPS - 1, STEPS)
    assert last["seamless_critic_score_mean"][()] == pytest.approx(steps[int(shown)]["critic/score/mean"])
    assert last["seamless_timing_step_seconds"][()] > 0
    assert sum(last["seamless_device_time_ratio"].values()) == pytest.approx(1, abs=0.01)


def check_traces(traces: dict[bytes, list[Span]], job: Job) -> None:
    """Every session that was trained has a trace of its own, with each span, in that of its agent."""
    sessions = [
        trace for trace in traces.values() if attributes(of_name(trace, "session")[0])["session.outcome"] == "trained"
    ]
    assert len(sessions) == STEPS * PROMPTS * SAMPLES
    for spans in sessions:
        [root], calls = of_name(spans, "session"), of_name(spans, "call")
        session_id = attributes(root)["session.id"]
        agents = hashlib.sha256(session_id.encode()).digest()[:16]
        assert root.trace_id == agents and root.parent_span_id == agents[:8]
        assert len(calls) == 2 == int(attributes(root)["session.calls"])
        assert {span.parent_span_id for span in calls} == {agents[:8]}
        for name in ("queue", "engine"):
            assert {span.parent_span_id for span in of_name(spans, name)} == {span.span_id for span in calls}
        [gap], [reward], [training] = (of_name(spans, name) for name in ("tool gap", "reward", "training"))
        order = [root.start_time_unix_nano, calls[0].start_time_unix_nano, calls[0].end_time_unix_nano]
        order += [gap.start_time_unix_nano, gap.end_time_unix_nano, calls[1].end_time_unix_nano]
        order += [reward.start_time_unix_nano, reward.end_time_unix_nano, training.start_time_unix_nano]
        assert [*order, training.end_time_unix_nano] == sorted([*order, root.end_time_unix_nano])
        assert gap.end_time_unix_nano - gap.start_time_unix_nano > 0.04e9, "the agent slept 50 ms between its calls"
    journal = JournalReader(job.folder / "checkpoints" / "trajectories.sqlite")
    known = {session.session_id for session in journal.sessions()}
    assert {attributes(of_name(trace, "session")[0])["session.id"] for trace in traces.values()} <= known


def of_name(spans: list[Span], name: str) -> list[Span]:
    return sorted((span for span in spans if span.name == name), key=lambda span: span.start_time_unix_nano)


def attributes(span: Span) -> dict[str, str]:
    return {one.key: one.value.string_value or str(one.value.int_value) for one in span.attributes}
