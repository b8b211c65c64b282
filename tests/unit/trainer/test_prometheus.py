"""What Prometheus gets: names by its conventions, of every metric that the page lists; and what the dashboard asks."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Mapping

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from ray.exceptions import GetTimeoutError
from support.metric_names import PAGE, listed, put_in
from support.pages import DOCS

from seamless_verl.errors import ConfigError
from seamless_verl.rollout.observation import ReplicaLoad, RolloutObservation
from seamless_verl.trainer.prometheus import MetricSample, RunCollector, families, replica_samples, sample_of, serve

NAME = re.compile(r"seamless(_[a-z0-9]+)+")
NOT_BASE = re.compile(r"_(ms|millis|minutes|hours|gb|mb|kb|gib|percent|share)(_|$)")
ROW = re.compile(r"^\| (`.+?`(?:, `.+?`)*) \| (.+?) \| (.+) \|$", re.MULTILINE)
SEEN = RolloutObservation((ReplicaLoad("replica-0", 3, 1, 8, 40), ReplicaLoad("replica-1", serves=False)), waiting=2)


def filled(name: str) -> str:
    """With words where the page lists no values."""
    return re.sub(r"<(\w+)>", r"some_\1", name)


def text_of(*samples: MetricSample) -> str:
    class Given:
        def collect(self) -> object:
            return families(samples)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Given())  # type: ignore[arg-type]
    return generate_latest(registry).decode()


def read(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                found.setdefault(sample.name, {})[tuple(sample.labels.items())] = sample.value
    return found


@pytest.mark.parametrize("path", sorted(listed() | listed(of_verl=True)))
def test_each_name_of_the_page_is_one_of_prometheus(path: str) -> None:
    sample = sample_of(filled(path), 1.0)
    assert NAME.fullmatch(sample.name) and not NOT_BASE.search(sample.name)
    assert not sample.name.endswith(("_total", "_count", "_sum", "_bucket")) or "skipped_updates_sum" in path


def test_what_the_page_counts_grows_and_nothing_else_does() -> None:
    ours = PAGE.read_text(encoding="utf-8").partition("\n## verl's own that matter here\n")[0]
    counted, others = set[str](), set[str]()
    for names, unit, meaning in ROW.findall(ours):
        for path in put_in(re.findall(r"`(.+?)`", names), meaning):
            (counted if unit in ("count", "count of the run") else others).add(filled(path))
    counted -= {"tokens/trained"}  # tokens that are dropped later are trained no more
    assert {path for path in counted if not sample_of(path, 1.0).grows} == set()
    assert {path for path in others if sample_of(path, 1.0).grows} == set()


def test_names_with_the_same_labels_share_a_family_of_one_kind() -> None:
    samples = [sample_of(filled(path), 1.0) for path in listed() | listed(of_verl=True)]
    shapes: dict[str, set[tuple[object, ...]]] = {}
    for sample in samples:
        shapes.setdefault(sample.name, set()).add((sample.grows, *(label for label, _ in sample.labels)))
    assert {name for name, shape in shapes.items() if len(shape) > 1} == set()
    assert len({(sample.name, sample.labels) for sample in samples}) == len(samples), "two names became one"


@pytest.mark.parametrize(
    ("path", "value", "name", "labels", "seen"),
    [
        ("tokens/dropped/stale", 7, "seamless_tokens_dropped_total", {"reason": "stale"}, 7),
        ("calls/stop", 2, "seamless_calls_ended_total", {"finish": "stop"}, 2),
        ("calls/running", 2, "seamless_calls_running", {}, 2),
        ("fleet/serving", 2, "seamless_fleet_replicas", {"state": "serving"}, 2),
        ("seamless/device/idle_share", 0.25, "seamless_device_time_ratio", {"kind": "idle"}, 0.25),
        (
            "seamless/device/train-0/idle_share",
            0.25,
            "seamless_device_time_of_one_ratio",
            {"device": "train-0", "kind": "idle"},
            0.25,
        ),
        ("timing_s/update_actor", 1.5, "seamless_timing_update_actor_seconds", {}, 1.5),
        ("timing_per_token_ms/gen", 500, "seamless_timing_per_token_gen_seconds", {}, 0.5),
        ("actor/perf/max_memory_allocated_gb", 2, "seamless_actor_perf_max_memory_allocated_bytes", {}, 2.0**31),
        ("val-core/my-sums é/reward/mean@4", 0.5, "seamless_val_core_my_sums___reward_mean_4", {}, 0.5),
    ],
)
def test_a_metric_as_prometheus_reads_it(
    path: str, value: float, name: str, labels: Mapping[str, str], seen: float
) -> None:
    assert read(text_of(sample_of(path, value))) == {name: {tuple(labels.items()): seen}}


def test_each_replica_is_a_label() -> None:
    found = read(text_of(*replica_samples(SEEN)))
    one, two = (("replica", "replica-0"),), (("replica", "replica-1"),)
    assert found["seamless_replica_running_calls"] == {one: 3, two: 0}
    assert found["seamless_replica_generated_tokens_total"] == {one: 40, two: 0}
    assert found["seamless_replica_serves"] == {one: 1, two: 0}


def test_what_is_live_wins_and_is_left_out_while_no_data_plane_replies() -> None:
    replies = [({"calls/begun": 9.0}, SEEN), GetTimeoutError("late")]

    def live(_: float) -> tuple[dict[str, float], RolloutObservation]:
        reply = replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply

    registry = CollectorRegistry(auto_describe=False)
    registry.register(RunCollector({"calls/begun": 5.0, "seamless/ahead": 1.0}, live))
    first, second = (read(generate_latest(registry).decode()) for _ in range(2))
    assert first["seamless_calls_begun_total"] == {(): 9} and first["seamless_data_plane_up"] == {(): 1}
    assert second == {"seamless_ahead": {(): 1}, "seamless_data_plane_up": {(): 0}}


def test_a_port_that_is_taken_is_refused_by_name() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"seamless.metrics_port={port}.*cannot be listened to.*Set "):
            serve(port, CollectorRegistry())


def test_what_the_dashboard_asks_for_is_there() -> None:
    board = json.loads((DOCS / "grafana.json").read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"seamless_\w+", query)}
    paths = {filled(path) for path in listed() | listed(of_verl=True)}
    samples = [*(sample_of(path, 1.0) for path in paths), *replica_samples(SEEN)]
    assert asked <= {sample.name + "_total" * sample.grows for sample in samples}
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
