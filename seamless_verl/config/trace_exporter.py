"""Which exporter of traces the variables of OpenTelemetry's SDK name."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points

from seamless_verl.errors import ConfigError

EXPORTER, PROTOCOL, GROUP = "OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_PROTOCOL", "opentelemetry_traces_exporter"
PROTOCOL_OF_TRACES = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
OTLP = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}
ASKS = (EXPORTER, "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")  # one of them, for traces


def chosen_exporter(environment: Mapping[str, str]) -> EntryPoint | None:
    """The class that the variables name, not imported yet: OTLP's by default, over HTTP unless they say otherwise; None
    where none of them asks for traces, or for `none`. Raises ConfigError for one that is not installed.
    """
    name = environment.get(EXPORTER) or "otlp"
    if name == "none" or not any(map(environment.get, ASKS)):
        return None
    protocol = environment.get(PROTOCOL_OF_TRACES) or environment.get(PROTOCOL) or "http/protobuf"
    found = entry_points(group=GROUP)
    chosen = OTLP.get(protocol, protocol) if name == "otlp" else name
    if chosen in found.names:
        return found[chosen]
    key, value, good = (EXPORTER, name, "otlp, console or none")
    if name == "otlp":
        key, value, good = (PROTOCOL, protocol, "http/protobuf or grpc")
    raise ConfigError(key, value, f"is none of the exporters {sorted(found.names)}", f"Set {key}={good}")
