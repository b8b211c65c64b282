"""Serves the metrics of a run for Prometheus: of the steps that have ended, and of data planes and replicas as of now.

A name of docs/metrics.md becomes one of Prometheus: with the prefix `seamless_`, in base units, with `_total` where it
only grows, and with a label for what RULES names. A value that no step has had since is the last one that there was.

While no data plane replies, what it last said is left out: a count of an earlier moment would look like a restart.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import ray
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from seamless_verl.errors import ConfigError
from seamless_verl.resources.ledger.activity import DeviceUse
from seamless_verl.rollout.observation import RolloutObservation
from seamless_verl.rollout.replica import ReplicaState
from seamless_verl.trajectory.records import Finish

logger = logging.getLogger(__name__)
KEY = "seamless.metrics_port"
PREFIX = "seamless_"
KINDS, STATES, ENDS = ("|".join(members) for members in (DeviceUse, ReplicaState, Finish))
RULES = (
    (r"(tokens/dropped|fleet/given_up|replicas/lost|lending/lent|lending/reclaimed)/(?P<reason>\w+)", r"\1"),
    (r"(watchdog/(?:named|recovery))/(?P<kind>\w+)", r"\1"),
    (r"sessions/failed/(?P<kind>\w+)", "sessions/failed/of_kind"),
    (r"resumed/begun_again/(?P<why>\w+)", "resumed/begun_again"),
    (rf"calls/(?P<finish>{ENDS})", "calls/ended"),
    (rf"fleet/(?P<state>{STATES})", "fleet/replicas"),
    (r"routing/(?P<outcome>\w+)", "routing/calls"),
    (r"runner_tasks/(?P<state>\w+)", "runner_tasks"),
    (rf"seamless/device/(?P<kind>{KINDS})_(s|share)", r"device/time_\2"),
    (rf"seamless/device/run/(?P<kind>{KINDS})_share", "device/time_of_run_share"),
    (rf"seamless/device/(?P<device>[^/]+)/(?P<kind>{KINDS})_share", "device/time_of_one_share"),
    (r"seamless/ahead/lost_share/(\w+)", r"ahead/lost_with_\1_share"),
    (r"seamless/tokens/(\w+)", r"step/tokens/\1"),
    (r"timing_s/(.+)", r"timing/\1_s"),
    (r"timing_per_token_ms/(.+)", r"timing_per_token/\1_ms"),
    (r"perf/time_per_step", "perf/time_per_step_s"),
)
"""Patterns of names, whose named groups are labels, and what the rest becomes."""
UNITS = {"_s": ("_seconds", 1.0), "_ms": ("_seconds", 1e-3), "_share": ("_ratio", 1.0), "_gb": ("_bytes", 2.0**30)}
GROWS = re.compile(
    r"(tokens|calls|sessions|groups|cache|drafts|routing|gateway|resumed|watchdog/(named|recovery))/.+"
    r"|fleet/(given_up/.+|taken_back)|journal/deleted|lending/(lent/.+|reclaimed/.+|returned)|loop_workers/restarted"
    r"|replicas/(lost/.+|returned|failed_starts)|seamless/tail/(begun_again|steps)"
    r"|seamless/sampler/(judged|trained|dropped|reopened|lost|extra_samples|left_out)"
)
NOT_GROWING = (
    "calls/running",
    "tokens/trained",  # tokens that are dropped later are trained no more
    "drafts/saved_s",  # rejected drafts cost time
)
LIVE_S = 5.0  # for data planes to reply; Prometheus gives a scrape ten seconds, by default

Live = Callable[[float], tuple[Mapping[str, float], RolloutObservation]]
"""What data planes say within so many seconds: their metrics, and the load of each replica. Raises RayError."""


class MetricSample(NamedTuple):
    """A metric as Prometheus has it; a counter's name has no `_total` yet, which its family adds."""

    name: str
    labels: tuple[tuple[str, str], ...]
    value: float
    grows: bool


def sample_of(path: str, value: float) -> MetricSample:
    """The metric of this name of ours, or of verl's."""
    grows, labels, name = GROWS.fullmatch(path) is not None and path not in NOT_GROWING, {}, path
    for pattern, rest in RULES:
        if (match := re.fullmatch(pattern, path)) is not None:
            labels, name = match.groupdict(), match.expand(rest)
            break
    name = PREFIX + re.sub(r"\W", "_", name.removeprefix("seamless/"), flags=re.ASCII)
    for suffix, (unit, factor) in UNITS.items():
        if name.endswith(suffix):
            name, value = name.removesuffix(suffix) + unit, value * factor
            break
    return MetricSample(name, tuple(labels.items()), value, grows)


def replica_samples(seen: RolloutObservation) -> Iterator[MetricSample]:
    """The load of each replica."""
    for load in seen.replicas:
        labels = (("replica", load.replica_id),)
        yield MetricSample(f"{PREFIX}replica_running_calls", labels, load.running, False)
        yield MetricSample(f"{PREFIX}replica_slots", labels, load.slots, False)
        yield MetricSample(f"{PREFIX}replica_serves", labels, float(load.serves), False)
        yield MetricSample(f"{PREFIX}replica_generated_tokens", labels, load.generated, True)


def families(samples: Iterable[MetricSample]) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
    """The samples by their names; of two with the same labels, as where signs became underscores, the last counts."""
    by_name: dict[str, dict[tuple[tuple[str, str], ...], MetricSample]] = {}
    for sample in samples:
        by_name.setdefault(sample.name, {})[sample.labels] = sample
    for name, found in by_name.items():
        first = next(iter(found.values()))
        kind = CounterMetricFamily if first.grows else GaugeMetricFamily
        family = kind(name, "docs/metrics.md", labels=[label for label, _ in first.labels])
        for sample in found.values():
            family.add_metric([value for _, value in sample.labels], sample.value)
        yield family


class RunCollector(Collector):
    """Collects what `steps` have had, by the names of docs/metrics.md, and what is `live`."""

    def __init__(self, steps: Mapping[str, float], live: Live) -> None:
        self.steps, self.live = steps, live
        self.of_planes: frozenset[str] = frozenset()  # names of metrics that data planes have

    def collect(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        now: Mapping[str, float] = {}
        seen, replies = RolloutObservation(), 1.0
        try:
            now, seen = self.live(LIVE_S)
            self.of_planes = frozenset(now)
        except ray.exceptions.RayError as error:
            logger.info("a scrape is without metrics of the data planes: %s", error)
            replies = 0.0
        kept = {name: value for name, value in dict(self.steps).items() if name not in self.of_planes}
        samples = [sample_of(name, value) for name, value in {**kept, **now}.items()]
        up = MetricSample(f"{PREFIX}data_plane_up", (), replies, False)
        return families([*samples, *replica_samples(seen), up])


def serve(port: int, metrics: Collector) -> Callable[[], None]:
    """Serves metrics at this port of all addresses, 0 being any that is free; returns what ends it.

    Raises ConfigError where nothing can listen there.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(metrics)
    try:
        server, thread = start_http_server(port, registry=registry)
    except OSError as error:
        way_out = f"Set {KEY} to another one, or to 0 for any that is free"
        raise ConfigError(KEY, port, f"cannot be listened to: {error.strerror or error}", way_out) from error
    address = f"{ray.util.get_node_ip_address()}:{server.server_port}"
    logger.info("Metrics for Prometheus are at http://%s/metrics", address)

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return close
