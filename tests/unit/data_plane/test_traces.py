"""A session's trace: its spans, their times, and the agent's own trace above them."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from seamless_verl.data_plane.finished_sessions import HandedNote
from seamless_verl.data_plane.traces import SessionTraces, exporter_of, gaps
from seamless_verl.errors import ConfigError
from seamless_verl.journal import GroupDecided, GroupOutcome
from seamless_verl.rollout.call import AttemptTimes, CallTimes

AGENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
ASKED = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318"}
OTHER = "00-1af7651916cd43dd8448eb211c80319c-c7ad6b7169203331-01"


def call(name: str, began: float, ended: float, *attempts: AttemptTimes, agent: str = "", key: str = "s") -> CallTimes:
    attempts = attempts or (AttemptTimes(began, began + 1, ended, "replica-0"),)
    return CallTimes(key, name, began, ended, attempts, "stop", 10, 4, 7, agent)


class Recorded:
    def __init__(self) -> None:
        self.memory = InMemorySpanExporter()
        self.traces = SessionTraces(self.memory)
        self.traces.opened("s", "u", 100.0)

    def spans(self) -> list[ReadableSpan]:
        self.traces.provider.force_flush()
        return list(self.memory.get_finished_spans())

    def seconds(self) -> list[tuple[str, float, float]]:
        return [(one.name, (one.start_time or 0) / 1e9, (one.end_time or 0) / 1e9) for one in self.spans()]


def trained(recorded: Recorded) -> None:
    recorded.traces.closed("s", "finished")
    recorded.traces.acknowledged("s", True, HandedNote("u", scored=(121.0, 122.0)), 123.0)
    assert recorded.spans() == [], "it may still be dropped"
    recorded.traces.decided([GroupDecided("u", GroupOutcome.TRAINED, 5, taken=130.0)], 140.0)


def test_a_trained_session_has_each_span_with_its_times() -> None:
    recorded = Recorded()
    recorded.traces.call_ended(call("s.1", 101.0, 105.0))
    cut = AttemptTimes(110.0, 111.0, 113.0, "replica-0"), AttemptTimes(113.0, 114.0, 118.0, "replica-1")
    recorded.traces.call_ended(call("s.2", 110.0, 118.0, *cut))
    trained(recorded)
    assert recorded.seconds() == [
        *(("session", 100.0, 140.0), ("call", 101.0, 105.0), ("queue", 101.0, 102.0), ("engine", 102.0, 105.0)),
        *(("call", 110.0, 118.0), ("queue", 110.0, 111.0), ("engine", 111.0, 113.0)),
        *(("queue", 113.0, 114.0), ("engine", 114.0, 118.0)),
        *(("tool gap", 105.0, 110.0), ("reward", 121.0, 122.0), ("training", 130.0, 140.0)),
    ]
    root, first, queue, *_, training = recorded.spans()
    assert root.parent is None and first.parent and queue.parent
    assert (first.parent.span_id, queue.parent.span_id) == (root.context.span_id, first.context.span_id)
    assert len({one.context.trace_id for one in recorded.spans()}) == 1
    assert dict(root.attributes or {}) == {
        "session.id": "s",
        "session.prompt": "u",
        "session.outcome": "trained",
        "session.closed": "finished",
        "session.calls": 2,
    }
    assert dict(training.attributes or {}) == {"training.step": 5}
    assert (first.attributes or {})["gen_ai.usage.output_tokens"] == 4


def test_a_session_is_in_the_trace_of_its_agent() -> None:
    recorded = Recorded()
    recorded.traces.call_ended(call("s.1", 101.0, 105.0))
    recorded.traces.call_ended(call("s.2", 106.0, 107.0, agent=AGENT))
    recorded.traces.call_ended(call("s.3", 108.0, 109.0, agent=OTHER))
    trained(recorded)
    root, *rest = recorded.spans()
    assert {f"{one.context.trace_id:032x}" for one in (root, *rest)} == {AGENT.split("-")[1]}
    parents = [one.parent.span_id for one in rest if one.name == "call" and one.parent]
    agents = int(AGENT.split("-")[2], 16)
    assert root.parent and root.parent.span_id == agents
    assert parents == [root.context.span_id, agents, root.context.span_id]


def test_what_is_not_trained_is_exported_when_that_is_known() -> None:
    recorded = Recorded()
    for name, uid in (("v", "w"), ("stale", "old"), ("late", "z")):
        recorded.traces.opened(name, uid, 100.0)
    recorded.traces.acknowledged("s", False, HandedNote("u"), 110.0)
    recorded.traces.acknowledged("v", True, HandedNote("w", validation=True), 111.0)
    recorded.traces.acknowledged("stale", True, HandedNote("old"), 112.0)
    recorded.traces.decided([GroupDecided("old", GroupOutcome.STALE, 3)], 113.0)
    found = [((one.attributes or {})["session.outcome"], one.name) for one in recorded.spans()]
    assert found == [("dropped", "session"), ("validation", "session"), ("stale", "session")]


def test_what_is_said_again_or_of_an_unknown_session_changes_nothing() -> None:
    recorded = Recorded()
    trained(recorded)
    recorded.traces.acknowledged("s", True, HandedNote("u"), 141.0)
    recorded.traces.acknowledged("unknown", True, HandedNote("u"), 141.0)
    recorded.traces.call_ended(call("x.1", 1.0, 2.0, key="unknown"))
    recorded.traces.decided([GroupDecided("u", GroupOutcome.TRAINED, 5)], 142.0)
    assert [one.name for one in recorded.spans()] == ["session", "reward", "training"]


def test_a_gap_is_where_no_call_runs() -> None:
    calls = [call("2", 4.0, 6.0), call("1", 1.0, 5.0), call("3", 9.0, 10.0), call("4", 10.0, 11.0)]
    assert list(gaps(calls)) == [(6.0, 9.0)] and list(gaps([])) == []


def test_the_variables_of_opentelemetry_choose() -> None:
    assert exporter_of({}) is None and exporter_of({"OTEL_TRACES_EXPORTER": "none"}) is None
    assert type(exporter_of({"OTEL_TRACES_EXPORTER": "console"})).__name__ == "ConsoleSpanExporter"
    http, grpc = exporter_of(ASKED), exporter_of(ASKED | {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})
    assert http and grpc and ".http." in type(http).__module__ and ".grpc." in type(grpc).__module__
    grpc.shutdown()
    http.shutdown()


@pytest.mark.parametrize(
    ("key", "value"), [("OTEL_TRACES_EXPORTER", "tempo"), ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")]
)
def test_an_exporter_that_is_not_there_is_refused_by_name(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key}='{value}'.*none of the exporters.*Set {key}="):
        exporter_of(ASKED | {key: value})
