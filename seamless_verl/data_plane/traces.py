"""Traces of sessions for OpenTelemetry, made when a session is trained or dropped, of the times noted until then.

    session
    ├── call            each call of the agent, with what it asked for
    │   ├── queue       until a replica has room
    │   └── engine      on that replica; of a call that was cut there are several
    ├── tool gap        between calls, while none runs: the agent and its tools work
    ├── reward          its score is computed
    └── training        from the moment the trainer takes its group to the step's end

The variables of OpenTelemetry's SDK say whether, and where to: OTEL_TRACES_EXPORTER, OTEL_EXPORTER_OTLP_*, OTEL_BSP_*,
OTEL_TRACES_SAMPLER and the others. An exporter that is slow loses traces, and holds nothing up.

Invariants: a session has one trace, with the trace id of the `traceparent` of its first call that has one. Sessions
that an earlier process of the data plane had open, or that no agent loop opened, have none.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from seamless_verl.config.trace_exporter import ASKS, chosen_exporter
from seamless_verl.data_plane.finished_sessions import HandedNote
from seamless_verl.journal import GroupDecided, GroupOutcome
from seamless_verl.rollout.call import CallTimes
from seamless_verl.runtime.process import BackgroundTask

logger = logging.getLogger(__name__)
DROPPED = "dropped"
EXPORT_S = 5.0  # for the last traces, at the end


def exporter_of(environment: Mapping[str, str]) -> SpanExporter | None:
    """The exporter that `chosen_exporter` finds, or None; raises what that raises."""
    chosen = chosen_exporter(environment)
    return None if chosen is None else chosen.load()()


@dataclass
class TracedSession:
    """What is known of a session; times are in seconds since the epoch."""

    uid: str
    opened: float
    calls: list[CallTimes] = field(default_factory=list)
    closed: str = ""  # why
    scored: tuple[float, float] | None = None


def gaps(calls: Sequence[CallTimes]) -> Iterator[tuple[float, float]]:
    """The times between calls in which none ran."""
    end: float | None = None
    for call in sorted(calls, key=lambda one: one.began):
        if end is not None and call.began > end:
            yield end, call.began
        end = call.ended if end is None else max(end, call.ended)


class SessionTraces:
    """Without an exporter it does nothing. Owned state: the sessions that are neither trained nor dropped, and those of
    each prompt that wait for it."""

    def __init__(self, exporter: SpanExporter | None) -> None:
        self.provider = None if exporter is None else TracerProvider(shutdown_on_exit=False)
        if self.provider is not None and exporter is not None:
            self.provider.add_span_processor(BatchSpanProcessor(exporter))
            self._tracer = self.provider.get_tracer("seamless_verl")
        self._agents = TraceContextTextMapPropagator()
        self._sessions: dict[str, TracedSession] = {}
        self._waiting = defaultdict[str, list[str]](list)

    def opened(self, session_id: str, uid: str, at: float) -> None:
        if self.provider is not None:
            self._sessions[session_id] = TracedSession(uid, at)

    def call_ended(self, call: CallTimes) -> None:
        if (session := self._sessions.get(call.key)) is not None:
            session.calls.append(call)

    def closed(self, session_id: str, reason: str) -> None:
        if (session := self._sessions.get(session_id)) is not None:
            session.closed = reason

    def acknowledged(self, session_id: str, kept: bool, note: HandedNote, at: float) -> None:
        """One that is kept waits for its group, unless it is of a validation."""
        if (session := self._sessions.get(session_id)) is None:
            return
        session.scored = note.scored
        if kept and not note.validation:
            self._waiting[session.uid].append(session_id)
        else:
            self._export(session_id, at, "validation" if kept else DROPPED)

    def decided(self, groups: Sequence[GroupDecided], at: float) -> None:
        """What became of groups: their sessions' traces are whole."""
        for group in groups:
            for session_id in self._waiting.pop(group.uid, ()):
                trained = (group.taken, group.step) if group.outcome is GroupOutcome.TRAINED else None
                self._export(session_id, at, str(group.outcome), trained)

    async def close(self) -> None:
        """Exports what waits to be exported, as far as the receiver takes it within EXPORT_S."""
        if self.provider is None:
            return
        closing = asyncio.wrap_future(BackgroundTask("traces", self.provider.shutdown).future)
        try:
            async with asyncio.timeout(EXPORT_S):
                await asyncio.shield(closing)
        except TimeoutError:
            logger.warning("the last traces were not taken in %g s: see where %s, %s and %s send them", EXPORT_S, *ASKS)

    def _export(self, session_id: str, end: float, outcome: str, trained: tuple[float, int] | None = None) -> None:
        if (session := self._sessions.pop(session_id, None)) is None:  # what is said again changes nothing
            return
        agent = self._agent_of(session.calls)
        about = {"session.id": session_id, "session.prompt": session.uid, "session.outcome": outcome}
        about |= {"session.closed": session.closed, "session.calls": len(session.calls)}
        whole = self._span("session", session.opened, end, agent, about)
        for call in session.calls:
            self._export_call(call, whole)
        for begin, until in gaps(session.calls):
            self._span("tool gap", begin, until, whole)
        if session.scored is not None:
            self._span("reward", *session.scored, whole)
        if trained is not None:
            self._span("training", trained[0], end, whole, {"training.step": trained[1]})

    def _export_call(self, call: CallTimes, session: Context) -> None:
        """Below the agent's own span, if it named one of the same trace."""
        agent, trace = self._agents.extract({"traceparent": call.traceparent}), _trace_of(session)
        about = {"call.id": call.call_id, "call.finish": call.finish, "call.weight_version": call.version}
        about |= {"gen_ai.usage.input_tokens": call.prompt, "gen_ai.usage.output_tokens": call.generated}
        within = self._span("call", call.began, call.ended, agent if _trace_of(agent) == trace else session, about)
        for attempt in call.attempts:
            self._span("queue", attempt.asked, attempt.granted, within)
            if attempt.replica:
                self._span("engine", attempt.granted, attempt.ended, within, {"engine.replica": attempt.replica})

    def _agent_of(self, calls: Sequence[CallTimes]) -> Context:
        """The agent's span of the first call that names one, as the parent of its session."""
        first = next((call.traceparent for call in calls if call.traceparent), "")
        return self._agents.extract({"traceparent": first}, Context())

    def _span(
        self, name: str, begin: float, end: float, within: Context, about: Mapping[str, str | int] | None = None
    ) -> Context:
        """A span with these times; returns the context of those below it."""
        span = self._tracer.start_span(name, within, attributes=about, start_time=int(begin * 1e9))
        span.end(int(end * 1e9))
        return set_span_in_context(span, Context())


def _trace_of(context: Context) -> int:
    return get_current_span(context).get_span_context().trace_id
