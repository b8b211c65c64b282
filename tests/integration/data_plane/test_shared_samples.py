"""A replica that drafts is given what others generated after a prompt that it has a call of, in all their turns."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from support.local_plane import LocalDataPlane, ReplicaServer

from seamless_verl.data_plane import connections
from seamless_verl.data_plane.settings import PlaneSettings
from seamless_verl.rollout.precedence import name_of
from seamless_verl.rollout.shared_samples import SharedSample
from seamless_verl.tools.bench.stub_engine import StubEngine, stub_tokens
from seamless_verl.trajectory.records import tokens
from seamless_verl.transport import serve_engine

pytestmark = pytest.mark.integration
NAMES, TOKEN, PROMPT = ("replica-0", "replica-1"), "the replicas'", [3, 1, 4, 1, 5]


class LearningServer(ReplicaServer):
    def __init__(self) -> None:
        super().__init__()
        self.samples: list[SharedSample] = []
        self.learned = asyncio.Event()
        self.learn = SimpleNamespace(remote=self.add)

    async def add(self, samples: Sequence[SharedSample]) -> None:
        self.samples += samples
        if samples:
            self.learned.set()


@pytest.mark.parametrize("shares", [True, False])
async def test_the_last_call_of_a_prompt_gets_what_another_replica_generated(
    shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "SHARE_S", 0.01)
    plane = LocalDataPlane(PlaneSettings("local", TOKEN, capacity=1, shares=shares))
    engines = [StubEngine(name, version=1, delay_s=0.002) for name in NAMES]
    listening = [await serve_engine(one, "127.0.0.1", 0, token=TOKEN, replica_id=one.replica_id) for one in engines]
    servers = [LearningServer() for _ in NAMES]
    await plane.start()
    for name, listener, server in zip(NAMES, listening, servers, strict=True):
        await plane.attach(name, "127.0.0.1", listener.port, server)
    await plane.execute("commit", 1)
    await plane.execute("update_weights", list(NAMES), 1, [])
    long = asyncio.create_task(plane.generate("long", PROMPT, {"max_tokens": 1000, "stream_interval": 1}))
    while not any(one.running for one in engines):  # noqa: ASYNC110 an engine has no event of its first call
        await asyncio.sleep(0)
    of_long = next(i for i, one in enumerate(engines) if one.running)
    short = await plane.generate("short", PROMPT, {"max_tokens": 20})
    if shares:
        await asyncio.wait_for(servers[of_long].learned.wait(), 10)
        (sample,) = servers[of_long].samples
        assert sample.prompt == name_of(tokens(PROMPT).tobytes()) and sample.context.tolist() == PROMPT[-4:]
        assert sample.ids.tolist() == short.ids == stub_tokens(PROMPT, 20)
        servers[of_long].learned.clear()
    turn = [*PROMPT, *short.ids, 7]
    await plane.generate("short", turn, {"max_tokens": 10})
    if shares:
        await asyncio.wait_for(servers[of_long].learned.wait(), 10)
        later = servers[of_long].samples[-1]
        assert later.prompt == sample.prompt and later.context.tolist() == turn[-4:], "a later turn is of its first one"
    await asyncio.sleep(0.1)
    assert [len(server.samples) for server in servers] == [2 * (shares and i == of_long) for i in range(2)]
    assert not long.done()
    long.cancel()
    await asyncio.wait({long})
    plane.check_integrity()
    await plane.stop()
    for listener in listening:
        await listener.close()
