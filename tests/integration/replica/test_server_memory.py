"""The server's own book of what is put away, over an engine that keeps the same book and refuses what vLLM would."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from verl.workers.config import RolloutConfig
from verl.workers.rollout.replica import RolloutMode

from seamless_verl.replica import engine_load
from seamless_verl.replica.rereading import Rereading
from seamless_verl.replica.server import UNKNOWN, SeamlessServer
from seamless_verl.rollout.engine import PauseMode

pytestmark = pytest.mark.integration
BOTH = {"weights", "kv_cache"}


class StubEngine:
    """Memory by its tag, and the version of what is in it. `fails` is the method that fails when it is called next."""

    def __init__(self) -> None:
        self.mapped, self.version, self.asleep, self.running = set(BOTH), 0, set[str](), True
        self.loads, self.fails, self.read_what_is_away = 0, "", False
        self.staged: int | None = None

    async def sleep(self, level: int) -> None:
        assert not self.asleep, "vLLM puts away everything at once"
        assert self.mapped == BOTH, "it would be unmapped twice"
        self.running, self.asleep, self.mapped, self.version = False, set(BOTH), set(), -1

    async def wake_up(self, tags: list[str]) -> None:
        assert set(tags) <= self.asleep, "vLLM does not know that it is away"
        self.asleep -= set(tags)
        self.mapped |= set(tags)
        self.running = not self.asleep

    async def reset_prefix_cache(self, **_: Any) -> bool:
        return True

    async def reset_encoder_cache(self) -> None: ...

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        if method == self.fails:
            self.fails = ""
            if method == "load_staged":
                self.version = -1  # half of the weights are new
            return ["RuntimeError: no luck"]
        return [getattr(self, method)(*args)]

    def map_staged(self, pickled: bytes) -> None: ...

    def load_staged(self, version: int, bucket_bytes: int) -> float:
        assert "weights" in self.mapped, "loaded into memory that is not there"
        assert not self.running, "it generates while its weights change"
        self.version, self.loads = version, self.loads + 1
        return 0.0

    def put_cache_away(self) -> None:
        assert not self.asleep
        self.mapped.discard("kv_cache")

    def take_cache_back(self) -> None:
        assert not self.asleep, "vLLM maps it"
        self.mapped.add("kv_cache")

    def drop_memory(self) -> None: ...

    def verify_weights(self, staged: bytes) -> bool:
        self.read_what_is_away |= "weights" not in self.mapped
        return True

    def clock(self) -> float:
        return 0.0


class StubSource:
    """Pauses of the engine."""

    def __init__(self, engine: StubEngine) -> None:
        self.engine, self.paused, self.in_flight, self.version = engine, None, (), 0

    async def pause(self, mode: PauseMode) -> None:
        self.engine.running, self.paused = False, mode

    async def resume(self) -> None:
        self.engine.running, self.paused = True, None

    async def commit(self, version: int) -> None:
        assert not self.engine.running, "it generates while its weights change"
        self.version = version


class BookedServer(SeamlessServer):
    """The product's server without verl's set-up."""

    lora_as_adapter = False

    def __init__(self) -> None:
        self.engine = StubEngine()
        self.source, self.updating, self.put_away = StubSource(self.engine), asyncio.Lock(), frozenset()
        self.rollout_mode, self.node_rank, self.global_steps = RolloutMode.HYBRID, 0, 0
        self.replica_rank = 3
        self.config = RolloutConfig(name="vllm", free_cache_engine=True)
        self.activity = SimpleNamespace(doing=lambda use: nullcontext())

    async def clear_kv_cache(self) -> None: ...


class ServerMemory(RuleBasedStateMachine):
    """Commands in any order, as the rollout manager would repeat them; some loads fail."""

    @initialize()
    def start(self) -> None:
        self.server, self.version = BookedServer(), 1
        self.engine = self.server.engine
        self.released = False

    def released_now(self) -> None:
        """What the manager does before memory is put away: all calls are cut."""
        asyncio.run(self.server.source.pause(PauseMode.ABORT))
        self.released = True

    @rule()
    def sleep(self) -> None:
        self.released_now()
        asyncio.run(self.server.sleep())
        assert self.engine.mapped == set()

    @rule(fails=st.booleans())
    def put_cache_away(self, fails: bool) -> None:
        self.released_now()
        self.engine.fails = "put_cache_away" if fails and not self.server.put_away else ""
        if self.engine.fails:
            with pytest.raises(RuntimeError, match="no luck"):
                asyncio.run(self.server.put_cache_away())
        else:
            asyncio.run(self.server.put_cache_away())
            assert "kv_cache" not in self.engine.mapped

    @rule(new=st.booleans(), fails=st.sampled_from(["", "", "map_staged", "load_staged", "take_cache_back"]))
    def load(self, new: bool, fails: str) -> None:
        self.version += new
        self.engine.fails, before, had = fails, self.engine.loads, self.engine.version
        known = self.server.loaded == self.version and "weights" not in self.server.put_away
        try:
            asyncio.run(self.server.update_weights(self.version, []))
        except RuntimeError as error:
            assert "no luck" in str(error) and fails
            assert not self.engine.running or self.engine.version == had, "it serves what failed to load"
        else:
            self.released = False
            assert self.engine.running and self.engine.mapped == BOTH and self.engine.version == self.version
            assert self.engine.loads == before + (not known), "weights that are there are loaded again, or not at all"
        self.engine.fails = ""

    @rule()
    def verify(self) -> None:
        here = self.server.loaded == self.version
        assert asyncio.run(self.server.verify_weights(self.version, [])) == ("" if here else None)
        assert not self.engine.read_what_is_away

    @invariant()
    def generates_only_with_everything_in_its_place(self) -> None:
        assert not self.engine.running or self.engine.mapped == BOTH
        assert frozenset(BOTH) - self.engine.mapped <= self.server.put_away, "something is away that it believes here"
        assert self.engine.asleep <= self.server.put_away


ServerMemory.TestCase.settings = settings(max_examples=100, stateful_step_count=20, deadline=None)
TestServerMemory = ServerMemory.TestCase


class ReadingEngine(StubEngine):
    """Reads as long as nobody aborts it."""

    def __init__(self) -> None:
        super().__init__()
        self.model_config = SimpleNamespace(max_model_len=16, enable_return_routed_experts=False)
        self.reading = asyncio.Event()

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        self.reading.set()
        await asyncio.Event().wait()
        yield None


def test_a_load_waits_until_what_an_engine_reads_has_ended_and_is_then_sent_behind_the_pause() -> None:
    """A pause that waited for it alone would come after the load: tokens of the new weights had the old version."""

    async def load() -> Any:
        server = BookedServer()
        server.engine = engine = ReadingEngine()
        server.source, server.loaded = StubSource(engine), 0
        server.rereading = Rereading(engine, None)
        read = asyncio.ensure_future(server.reread([1, 2, 3], 0, patience_s=0.05))
        await engine.reading.wait()
        await server.update_weights(1, [])
        assert engine.running and engine.version == 1
        return await read

    assert asyncio.run(load()) is None


class HeldEngine(StubEngine):
    """Its loads begin, and go on until `held` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.loading, self.held = asyncio.Event(), asyncio.Event()

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        if method == "load_staged":
            self.loading.set()
            await self.held.wait()
        return await super().collective_rpc(method, args)


async def some_turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize("fails", ["", "load_staged"])
async def test_within_a_load_no_state_is_reported_and_nothing_is_generated(fails: str) -> None:
    """A data plane that starts again meanwhile asks for the state, and its repeated commands may resume."""
    server = BookedServer()
    server.engine = engine = HeldEngine()
    server.source = StubSource(engine)
    engine.held.set()
    await server.update_weights(1, [])
    assert await server.status() == (1, None)
    engine.held.clear()
    engine.loading.clear()
    engine.fails = fails
    loading = asyncio.create_task(server.update_weights(2, []))
    await engine.loading.wait()
    await some_turns()
    assert (server.source.version, server.source.paused) == (1, PauseMode.KEEP), "what it would report"
    status = asyncio.create_task(server.status())
    resuming = asyncio.create_task(server.resume())
    await some_turns()
    assert not status.done() and not resuming.done() and not engine.running
    engine.held.set()
    await asyncio.wait({loading})
    assert await status == ((UNKNOWN, "keep") if fails else (2, None))
    await resuming


class BrokenEngine(StubEngine):
    """As many of its calls to `method` as `broken` find a seal that does not fit."""

    def __init__(self, method: str, broken: int) -> None:
        super().__init__()
        self.method, self.broken = method, broken

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        replies = await super().collective_rpc(method, args)
        if method == self.method and self.broken:
            self.broken -= 1
            return ["SealError: version 2, shard 0: norm: not what was staged. What fitted last: version 1"]
        return replies


@pytest.mark.parametrize(
    ("method", "broken", "loads", "ends", "says"),
    [
        ("load_staged", 1, 2, False, ["It loads again"]),
        ("load_staged", 2, 2, True, ["It loads again", "It is ended"]),
        ("map_staged", 1, 0, None, ["It waits for the next version"]),
    ],
)
async def test_a_seal_that_does_not_fit(
    method: str, broken: int, loads: int, ends: bool | None, says: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line for each, another load, and the end of a server that differs again; staged memory is as it is."""
    lines, ended = list[str](), list[bool]()
    monkeypatch.setattr(engine_load, "show_line", lines.append)
    server = BookedServer()
    server.engine = engine = BrokenEngine(method, broken)
    server.source = StubSource(engine)
    server._end_at_once = lambda: ended.append(engine.running)
    if ends is None:
        with pytest.raises(RuntimeError, match="SealError"):
            await server.update_weights(2, [])
    else:
        await server.update_weights(2, [])
    assert engine.loads == loads and ended == ([False] if ends else [])
    assert engine.running is (ends is not True), "it serves what does not fit, or what fits is not served"
    assert (server.loaded == 2) is (ends is False)
    assert [line.rsplit(". ", 1)[1] for line in lines] == says
    assert all(line.startswith("replica-3: SealError: version 2, shard 0: norm") for line in lines)


async def test_weights_that_changed_while_the_cache_was_away_are_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = list[str]()
    monkeypatch.setattr(engine_load, "show_line", lines.append)
    server = BookedServer()
    server.engine = engine = BrokenEngine("take_cache_back", 1)
    server.source = StubSource(engine)
    await server.update_weights(1, [])
    await server.source.pause(PauseMode.ABORT)
    await server.put_cache_away()
    await server.update_weights(1, [])
    assert (engine.loads, engine.mapped, engine.running, server.put_away) == (2, BOTH, True, frozenset())
    assert len(lines) == 1 and server.loaded == 1
