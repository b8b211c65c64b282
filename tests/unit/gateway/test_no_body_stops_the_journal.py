"""Nothing that a caller sends stops the journal's writer: any JSON to the admin, reward and runner addresses."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as some
from support.asgi import ADMIN_KEY as KEY
from support.asgi import ask, middleware_before, no_calls
from support.journal import session_opened

from seamless_verl.data_plane.lease_book import LeaseTerms, TaskOrder
from seamless_verl.data_plane.runner_requests import RunnerRequests
from seamless_verl.data_plane.runner_tasks import RunnerTasks
from seamless_verl.gateway.admin import Admin
from seamless_verl.gateway.recorder import JournalRecorder
from seamless_verl.gateway.sessions import SessionTable
from seamless_verl.journal import JournalReader, SqliteJournal

EXAMPLES = 150
ANY_CHARACTER = some.characters(exclude_categories=())  # halves of surrogate pairs too
TEXT = some.text(ANY_CHARACTER, max_size=6) | some.sampled_from(["\ud800", "a\udfff", "\x00", ""])
NUMBER = (
    some.integers(-3, 3)
    | some.sampled_from([1 << 63, -(1 << 64), 10**400, -(10**4200)])
    | some.floats(allow_nan=True, allow_infinity=True)
)
NESTED = some.sampled_from(["nested 100", "nested 300", "nested 900", "nested 964", "nested 970", "nested 5000"])
VALUE = NESTED | some.recursive(
    some.none() | some.booleans() | NUMBER | TEXT,
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
SAMPLING = some.dictionaries(some.sampled_from(["temperature", "top_p", "top_k", "seed"]), VALUE, max_size=2)


def body_of(good: dict[str, Any], odd: dict[str, some.SearchStrategy[Any]]) -> some.SearchStrategy[Any]:
    """Good bodies in which up to two fields are odd ones, or anything; and whatever else is JSON."""
    fields = some.sampled_from(sorted(odd)).flatmap(
        lambda name: some.fixed_dictionaries({name: odd[name] | odd[name] | VALUE})
    )
    none = some.just(dict[str, Any]())
    nearly = some.builds(lambda one, other: good | one | other, none | fields, none | fields)
    return nearly | nearly | VALUE


OPENING = body_of(
    {"uid": "u"},
    {
        "uid": TEXT,
        "metadata": some.dictionaries(TEXT, VALUE, max_size=3),
        "limits": some.dictionaries(some.sampled_from(["max_turns", "max_tokens", "lifetime"]), NUMBER, max_size=2),
        "sampling": some.fixed_dictionaries({}, optional={"overrides": SAMPLING, "max_tokens": NUMBER}),
    },
)
REWARD = body_of({"reward": 1}, {"reward": NUMBER, "name": TEXT, "other": VALUE})
CLOSING = body_of({}, {"reason": TEXT})
LEASING = body_of(
    {"protocol": 2, "runner": "r", "agents": ["a"], "wait_s": 0},
    {"runner": TEXT, "agents": some.just(["a", "b"]) | some.lists(TEXT)},
)
COMPLETION = body_of(
    {"status": "finished"},
    {"reward": NUMBER, "reward_info": some.dictionaries(TEXT, VALUE), "error": TEXT, "duration_s": NUMBER},
)
RETURN = body_of({"reason": "stopped"}, {"reason": TEXT, "refused": some.booleans()})
ENDS = some.permutations(["complete", "return"]).flatmap(
    lambda kinds: some.tuples(*(some.tuples(some.just(kind), BODIES_OF_ENDS[kind]) for kind in kinds))
)
BODIES_OF_ENDS = {"complete": COMPLETION, "return": RETURN}


def bodies_with(odd: Any, infinity: str = "Infinity") -> Any:
    """Each body with an odd value where anything is taken."""
    given = {"odd": odd}
    completion = {"status": "finished", "reward_info": given}
    ends = (("complete", completion), ("return", {"reason": "", "odd": odd}))
    return {"uid": "u", "metadata": given}, {"reward": 1, **given}, given, {"odd": odd}, ends, infinity


JSON_OF_INFINITY = some.sampled_from(["Infinity", "1e999"])  # the second one is JSON, and too large for a float


class Served:
    """The middleware before a real journal, without vLLM's serving classes behind it."""

    def __init__(self, journal: SqliteJournal) -> None:
        self.journal, self.failures = journal, list[BaseException]()
        self.table = SessionTable()
        recorder = JournalRecorder(journal)
        admin = Admin(self.table, recorder, cancel=no_calls)
        self.recorder, self.admin, self.closed = recorder, admin, dict[str, asyncio.Event]()
        self.gateway = SimpleNamespace(table=self.table)
        self.calls = SimpleNamespace(paused_time=SimpleNamespace(seconds=lambda name: 0.0))
        self.tasks = RunnerTasks(self, on_failure=self.failures.append)  # type: ignore[arg-type]
        runners = RunnerRequests(self.tasks)
        self.middleware = middleware_before(
            None,
            self.table,
            admin=admin,
            on_refusal=recorder.note_refusal,
            serve_runner=runners.handle,
            on_outside_refusal=runners.refused,
        )

    async def open(self, body: dict[str, Any]) -> dict[str, Any]:
        return await self.admin.open(body, awaited=True)

    async def drop(self, session_id: str, *why: Any) -> None:
        await self.admin.close(session_id, "dropped")

    async def send(self, method: str, path: str, body: bytes, key: str = KEY) -> tuple[int, Any]:
        status, reply = await ask(self.middleware, path, body, method=method, key=key)
        return status, json.loads(reply, parse_constant=no_json)


def as_json(body: Any, infinity: str) -> bytes:
    """The body, with lists so deep for the texts of NESTED."""
    text = json.dumps(body).replace("Infinity", infinity)
    return re.sub('"nested ([0-9]+)"', lambda found: int(found[1]) * "[" + int(found[1]) * "]", text).encode()


def no_json(name: str) -> float:
    raise AssertionError(f"{name} in a reply is no JSON")


@asynccontextmanager
async def serving(path: Path) -> AsyncGenerator[Served, None]:
    with SqliteJournal(path) as journal:
        served = Served(journal)
        await served.tasks.start(restarted=False)
        yield served
        await served.tasks.stop()
        assert not served.failures


def test_no_body_stops_the_writer(tmp_path: Path) -> None:
    seen, number = set[tuple[str, int]](), 0
    runner = asyncio.Runner()
    context = serving(tmp_path / "journal.sqlite")
    served = runner.run(context.__aenter__())

    async def post(what: str, path: str, body: Any, infinity: str, key: str = KEY) -> Any:
        status, reply = await served.send("POST", path, as_json(body, infinity), key)
        assert status == 200 or 400 <= status < 500, (path, status, reply)
        seen.add((what, status))
        return reply if status == 200 else None

    async def scenario(opening: Any, reward: Any, closing: Any, leasing: Any, ends: Any, infinity: str) -> None:
        nonlocal number
        number += 1
        opened = await post("open", "/admin/sessions", opening, infinity) or await served.admin.open({"uid": "u"})
        assert (await served.send("GET", "/admin/sessions", b""))[0] == 200
        session = f"/admin/sessions/{opened['session_id']}"
        await post("reward", f"{session}/reward", reward, infinity)
        await post("own reward", "/v1/session/reward", reward, infinity, opened["key"])
        await post("close", f"{session}/close", closing, infinity)
        order = TaskOrder(f"t{number}", {}, {"uid": "u"}, 60.0, LeaseTerms("a", 10.0, None, 2))
        waiting = asyncio.create_task(served.tasks.run(order))
        await asyncio.sleep(0)
        leased = await post("lease", "/runner/lease", leasing, infinity)
        lease_id = leased["lease"]["lease_id"] if leased and leased["lease"] else "none"
        for end, body in ends:
            await post(end, f"/runner/leases/{lease_id}/{end}", body, infinity)
        waiting.cancel()
        await asyncio.wait({waiting})
        await served.journal.append(session_opened(f"probe {number}"))  # by the writer, which is alive

    @settings(
        max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(some.tuples(OPENING, REWARD, CLOSING, LEASING, ENDS, JSON_OF_INFINITY))
    @example(bodies_with(inf, "1e999"))
    @example(bodies_with("\ud800"))
    @example(bodies_with(10**400))
    @example(bodies_with("nested 964"))
    def run_case(bodies: Any) -> None:
        runner.run(scenario(*bodies))

    try:
        run_case()
        requests = ("open", "reward", "own reward", "close", "lease", "complete", "return")
        assert {(what, status) for what in requests for status in (200, 400)} <= seen, "too odd, or not odd enough"
    finally:
        runner.run(context.__aexit__(None, None, None))
        runner.close()
    reader = JournalReader(tmp_path / "journal.sqlite")
    for summary in reader.sessions():
        assert reader.read(summary.session_id) is not None
    reader.outside_events()
    reader.check_integrity()
