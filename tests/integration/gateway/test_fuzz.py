"""What the gateway's own OpenAPI schema allows, and nearly allows: no request breaks it, or stops its journal, and none
is left behind."""

from __future__ import annotations

import asyncio
import json
import string
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from support.gateway import GatewayHarness, gateway_harness

from seamless_verl.gateway.http import COUNT_TOKENS_PATH, GENERATION_PATHS
from seamless_verl.gateway.recorder import JournalRecorder
from seamless_verl.gateway.server import ROUTERS
from seamless_verl.gateway.token_requests import TOKENS_PATH
from seamless_verl.journal import OutsideEvent, SqliteJournal

pytestmark = pytest.mark.integration
EXAMPLES, DEPTH = 60, 4
TEXT = some.text(string.printable + "é漢🙂\x00", max_size=12) | some.sampled_from(["", "\ud800"])
ANYTHING = some.recursive(
    some.none() | some.booleans() | some.integers(-3, 1 << 65) | some.floats(allow_nan=False) | TEXT,
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
SENSIBLE: dict[str, some.SearchStrategy[Any]] = {
    "model": some.sampled_from(["nano", "nano", "nano", "other"]),
    "stream": some.booleans(),
    "n": some.integers(0, 4),
    "max_tokens": some.integers(0, 40),
}
"""Without these nearly all requests would be refused for one reason."""

TALK = [{"role": "user", "content": "hello"}]
SANE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "nano", "messages": TALK},
    "/v1/completions": {"model": "nano", "prompt": "hello"},
    "/v1/responses": {"model": "nano", "input": "hello"},
    "/v1/messages": {"model": "nano", "messages": TALK, "max_tokens": 8},
    TOKENS_PATH: {"model": "nano", "token_ids": [104, 105], "sampling_params": {"max_tokens": 8}},
    "/v1/messages/count_tokens": {"model": "nano", "messages": TALK},
}
"""What is answered by itself; with other fields of the schema beside it, it reaches the code behind validation."""

ASKED = ("prompt", "input")
"""Not required by the schema, and refused without; half of the time a text."""


class Schemas:
    """Strategies from the JSON schemas of an OpenAPI document; `DEPTH` references deep, then anything."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._known, self._paths = document["components"]["schemas"], document["paths"]
        self._made: dict[tuple[str, int], some.SearchStrategy[Any]] = {}

    def body(self, path: str) -> some.SearchStrategy[Any]:
        """Sane bodies with other fields beside, bodies of the schema, and anything; the sane one alone comes first."""
        content = self._paths[path]["post"]["requestBody"]["content"]
        asked = self.of(content["application/json"]["schema"], 0)
        beside = some.builds(lambda body: body if isinstance(body, dict) else {}, asked)
        return beside.map(lambda body: body | SANE[path]) | asked | ANYTHING

    def of(self, schema: Any, depth: int) -> some.SearchStrategy[Any]:
        """Values of a schema, and one in many that is not."""
        if not isinstance(schema, dict) or depth > DEPTH:
            return ANYTHING
        if "$ref" in schema:
            return self._named(schema["$ref"].rpartition("/")[2], depth + 1)
        for several in ("anyOf", "oneOf", "allOf"):
            if several in schema:
                return some.one_of([self.of(one, depth) for one in schema[several]])
        if "enum" in schema or "const" in schema:
            return some.sampled_from(schema.get("enum") or [schema["const"]]) | TEXT
        kind = schema.get("type")
        return self._plain(schema, depth) if kind not in ("object", "array") else self._nested(schema, kind, depth)

    def _named(self, name: str, depth: int) -> some.SearchStrategy[Any]:
        if (name, depth) not in self._made:
            self._made[name, depth] = self.of(self._known[name], depth)
        return self._made[name, depth]

    def _plain(self, schema: dict[str, Any], depth: int) -> some.SearchStrategy[Any]:
        low, high = schema.get("minimum"), schema.get("maximum")
        kinds: dict[str | None, some.SearchStrategy[Any]] = {
            "string": TEXT,
            "boolean": some.booleans(),
            "null": some.none(),
            "integer": some.integers(low if low is not None else -2, high if high is not None else 50),
            "number": some.floats(-3, 3),
        }
        return kinds.get(schema.get("type"), ANYTHING)

    def _nested(self, schema: dict[str, Any], kind: str, depth: int) -> some.SearchStrategy[Any]:
        if kind == "array":
            return some.lists(self.of(schema.get("items"), depth), max_size=3)
        fields = {name: self._field(name, one, depth) for name, one in schema.get("properties", {}).items()}
        if not fields:
            return some.dictionaries(TEXT, ANYTHING, max_size=3)
        needed = {name: fields.pop(name) for name in [*schema.get("required", ()), *ASKED] if name in fields}
        if not fields:
            return some.fixed_dictionaries(needed)
        chosen = some.lists(some.sampled_from(list(fields)), max_size=4, unique=True)
        return chosen.flatmap(lambda names: some.fixed_dictionaries(needed | {name: fields[name] for name in names}))

    def _field(self, name: str, schema: Any, depth: int) -> some.SearchStrategy[Any]:
        if name in SENSIBLE:
            return SENSIBLE[name]
        made = self.of(schema, depth)
        return TEXT | made if name in ASKED else made


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SqliteJournal]:
    with SqliteJournal(tmp_path_factory.mktemp("fuzz") / "journal.sqlite") as journal:
        yield journal


@pytest.fixture(scope="module")
def running(nano: Path, journal: SqliteJournal) -> Iterator[tuple[asyncio.Runner, GatewayHarness, dict[str, Any]]]:
    """A gateway whose replicas say one thing, the loop it lives on, and its OpenAPI document."""
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        options = {"limit_s": None, "max_running": 8, "recorder": JournalRecorder(journal)}
        harness = runner.run(stack.enter_async_context(gateway_harness(nano, **options)))
        app = FastAPI()
        for router in ROUTERS:
            app.include_router(router)
        yield runner, harness, app.openapi()
        runner.run(stack.aclose())


def refused_well(path: str, text: str) -> bool:
    error = json.loads(text).get("error")
    return isinstance(error, dict) and bool(error.get("message")) and isinstance(error.get("type"), str)


@pytest.mark.parametrize("path", sorted({*GENERATION_PATHS, COUNT_TOKENS_PATH}))
def test_no_body_breaks_it(
    running: tuple[asyncio.Runner, GatewayHarness, dict[str, Any]], path: str, journal: SqliteJournal
) -> None:
    runner, harness, document = running
    seen: set[int] = set()

    @settings(
        max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(Schemas(document).body(path))
    def run_case(body: Any) -> None:
        url, headers = f"{harness.gateway.url}{path}", {"authorization": f"Bearer {harness.session['key']}"}
        sent = json.dumps(body, allow_nan=True).encode()
        reply = runner.run(harness.http.post(url, content=sent, headers=headers))
        seen.add(reply.status_code)
        assert reply.status_code < 500, (reply.status_code, reply.text)
        assert "Traceback" not in reply.text and '.py"' not in reply.text
        assert '"code": 5' not in reply.text and '"code":5' not in reply.text, reply.text
        assert reply.status_code == 200 or refused_well(path, reply.text), reply.text
        runner.run(harness.drain())
        table = harness.gateway.table
        assert table.running == 0 and table.get(harness.session["session_id"]).running == 0
        journal.submit(OutsideEvent("probe", path, {}, 0.0)).result(timeout=60)  # its writer is alive

    run_case()
    assert {200, 400} <= seen, "the schema is not what is asked"
    harness.gateway.table.check_integrity()
    journal.check_integrity()
    (stored,) = journal.restore()
    calls = [call for call in stored.calls if not call.interrupted]
    assert len(calls) == len(stored.calls) and (calls or path == COUNT_TOKENS_PATH)


def test_the_document_has_every_path(running: tuple[asyncio.Runner, GatewayHarness, dict[str, Any]]) -> None:
    assert {*GENERATION_PATHS, COUNT_TOKENS_PATH} <= set(running[2]["paths"])
