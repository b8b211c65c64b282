"""Kill -9 of the data plane's processes under load: agents, loops and the trainer only wait, and nothing is lost."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import ray
from support.plane import VOCABULARY, Plane, plane

from seamless_verl.data_plane.client import plane_for
from seamless_verl.data_plane.finished_sessions import FinishedSession
from seamless_verl.data_plane.group_notifier import GroupEnd
from seamless_verl.errors import GroupsFailedError, JournalOrderError, ReplicaLostError
from seamless_verl.journal import JournalReader, Stage
from seamless_verl.tools.bench.stub_engine import stub_tokens

pytestmark = [pytest.mark.integration, pytest.mark.long]
AGENTS, TURNS, LENGTH = 6, 3, 60


@dataclass
class Queue:
    """The sessions that were put, by TransferQueue's keys, which are unique."""

    sessions: dict[str, FinishedSession]


async def agent(plane: Plane, number: int, queue: Queue) -> str:
    """A session of an agent on the unchanged openai SDK, with its two retries, as an agent loop runs it."""
    name = f"prompt-{number}_0"
    actor = plane_for(plane.config, name)
    opened = await actor.open_session.remote({"uid": name, "limits": {"lifetime": 300.0}})
    messages: list[Any] = []
    async with openai.AsyncOpenAI(base_url=opened["base_url"], api_key="unused") as client:
        for turn in range(TURNS):
            messages.append({"role": "user", "content": f"turn {turn} of {number}"})
            reply = await client.chat.completions.create(
                model="policy", messages=messages, max_tokens=LENGTH, temperature=1.0
            )
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})
    queue.sessions[name] = await actor.close_session.remote(opened["session_id"], "finished")
    await actor.acknowledge.remote(opened["session_id"])
    return str(opened["session_id"])


async def call_of_a_loop(plane: Plane, number: int) -> None:
    """A call of one of verl's own agent loops."""
    name, prompt = f"request-{number}", [number, 2, 3]
    done = await plane_for(plane.config, name).generate.remote(name, prompt, {"max_tokens": 5 * LENGTH})
    assert done.ids == stub_tokens(prompt, 5 * LENGTH, VOCABULARY) and len(done.versions) == 5 * LENGTH


class Trainer:
    """Commits, pauses and resumes until it is stopped."""

    def __init__(self, plane: Plane) -> None:
        self.plane, self.version, self.stopping = plane, 1, threading.Event()
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self.run)

    def run(self) -> None:
        try:
            while not self.stopping.is_set():
                self.version += 1
                self.plane.commit(self.version)
                cut = self.plane.names[: self.version % 2]
                ray.get(self.plane.first.execute.remote("pause", self.plane.names[:1], cut))
                time.sleep(0.05)
                ray.get(self.plane.first.execute.remote("resume", self.plane.names[:1]))
        except BaseException as error:
            self.error = error

    def __enter__(self) -> Trainer:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        self.thread.join()


def check(plane: Plane, folder: Path, shards: int, ids: list[str], queue: Queue, version: int) -> None:
    files = [plane.gateway.journal_of(shard, str(folder)) for shard in range(shards)]
    readers = [JournalReader(file) for file in files]
    for reader in readers:
        reader.check_integrity()
    found = {row.session_id: row for reader in readers for row in reader.sessions()}
    assert {found[name].stage for name in ids} == {Stage.HANDED}
    assert all(row.stage is Stage.OPEN for name, row in found.items() if name not in ids)  # whose reply was lost
    used = [sum(row.session_id in ids for row in reader.sessions()) for reader in readers]
    assert all(used), f"sessions by shard: {used}"
    for session in queue.sessions.values():
        assert session.turns == TURNS
        assert sum(int(sequence.response_mask.sum()) for sequence in session.sequences) == TURNS * LENGTH
        for sequence in session.sequences:
            versions = sequence.weight_version[sequence.response_mask.astype(bool)]
            assert versions.min() >= 1 and versions.max() <= version
    for name in ids:
        reader = next(reader for reader in readers if reader.stage(name) is not None)
        record = reader.read(name)
        assert record is not None
        for call in record.calls:
            assert call.turn().generated_ids.tolist() == stub_tokens(call.prompt_ids, LENGTH, VOCABULARY)


@pytest.mark.parametrize("shards", [1, 2])
def test_kills_under_load_only_delay_all_clients(nano: Path, tmp_path: Path, shards: int) -> None:
    queue, rng = Queue({}), random.Random()
    with plane(nano / "model", tmp_path, shards=shards) as running:
        running.commit(1)

        async def load() -> list[str]:
            work = [agent(running, number, queue) for number in range(AGENTS)]
            calls = [call_of_a_loop(running, number) for number in range(AGENTS)]
            busy = asyncio.gather(*work, *calls)
            for shard in range(shards):
                await asyncio.sleep(0.3 + rng.random())
                assert not busy.done(), "the load was too light to mean anything"
                await asyncio.to_thread(running.kill, shard)
            done = await busy
            return list(done[:AGENTS])

        with Trainer(running) as trainer:
            ids = asyncio.run(asyncio.wait_for(load(), 180))
        assert trainer.error is None, trainer.error
        metrics = ray.get(running.first.checked_metrics.remote())
        assert (metrics["fleet/serving"], metrics["fleet/dead"]) == (2, 0) and metrics["fleet/attached"] == 0
        assert ray.get([server.running.remote() for server in running.servers]) == [0, 0]
        check(running, tmp_path, shards, ids, queue, trainer.version)
        if shards == 2:
            check_a_stop_that_was_not_followed(running)
        if shards == 1:
            check_repeated_commands(running)
            check_connections_that_break(running)
            check_groups_that_fail(running)
        running.client.stop()


def check_repeated_commands(plane: Plane) -> None:
    first, version = plane.first, 1000
    assert ray.get(first.wait_for_groups.remote(57, 60.0), timeout=30) == 0  # a count of an earlier process
    ray.get(first.execute.remote("pause", plane.names))
    opened = ray.get(first.open_session.remote({"uid": "u"}))
    given = ray.get(first.close_session.remote(opened["session_id"], "finished"))
    ray.get(first.execute.remote("commit", version))
    assert ray.get(first.execute.remote("begin_sync", plane.names)) == plane.names
    plane.kill(0)
    assert ray.get(first.execute.remote("begin_sync", plane.names)) == plane.names
    ray.get([server.load.remote(version) for server in plane.servers])
    for _ in range(2):
        assert ray.get(first.execute.remote("end_sync", plane.names, version)) == plane.names
        assert [ray.get(server.status.remote()) for server in plane.servers] == [(version, "keep")] * 2  # held
    for _ in range(2):
        assert ray.get(first.execute.remote("resume", plane.names)) == plane.names
        assert ray.get(first.close_session.remote(opened["session_id"], "finished")) == given
    for _ in range(2):
        ray.get(first.acknowledge.remote(opened["session_id"]))
    check_masked_tokens(plane)
    with pytest.raises(JournalOrderError):
        ray.get(first.close_session.remote(opened["session_id"], "finished"))
    idle = dict.fromkeys(plane.names, 0)  # no calls
    assert (
        ray.get(first.execute.remote("release_memory", plane.names, 1))
        == idle
        == ray.get(first.execute.remote("release_memory", plane.names, 1))
    )
    plane.kill(0)
    assert ray.get(first.execute.remote("release_memory", plane.names, 1)) == idle
    assert ray.get(first.execute.remote("release_memory", plane.names, 2)) == {}
    assert ray.get(first.checked_metrics.remote())["fleet/released"] == 2, "training has them, and gives them back"
    ray.get(first.execute.remote("reclaim_memory", plane.names))
    with pytest.raises(ReplicaLostError, match="no replica serves"):
        ray.get(first.checked_metrics.remote())
    plane.commit(version + 1)
    for restarted in range(2):  # before and after a death
        assert ray.get(first.execute.remote("update_weights", plane.names, version + 1, [])) == plane.names
        assert [ray.get(server.status.remote()) for server in plane.servers] == [(version + 1, None)] * 2
        if not restarted:
            plane.kill(0)


def check_a_stop_that_was_not_followed(plane: Plane) -> None:
    """The first data plane was killed after the other one had stopped routing, and before it did anything itself."""
    first, second = plane.client.actors
    ray.get(second.execute.remote("quiesce", plane.names))
    assert ray.get(first.checked_metrics.remote())["fleet/serving"] == 2
    ray.get(second.execute.remote("begin_sync", plane.names))
    assert ray.get(first.checked_metrics.remote())["fleet/serving"] == 2
    version = ray.get(plane.servers[0].status.remote())[0]
    assert ray.get(first.execute.remote("update_weights", plane.names, version, [])) == plane.names  # repeated
    assert ray.get(second.checked_metrics.remote())["fleet/serving"] == 2


def check_masked_tokens(plane: Plane) -> None:
    """They are dropped in the account of all data planes, also in one that began again with its process."""
    before = ray.get(plane.first.checked_metrics.remote())
    ray.get(plane.first.count_masked.remote(10**6))
    after = ray.get(plane.first.checked_metrics.remote())
    moved = before["tokens/trained"]
    assert after["tokens/trained"] == 0 and after["tokens/dropped/stale"] == before["tokens/dropped/stale"] + moved
    plane.kill(0)
    assert ray.get(plane.first.checked_metrics.remote())["tokens/dropped/stale"] == 0, "of an earlier account"


def check_connections_that_break(plane: Plane) -> None:
    async def call(number: int) -> None:
        await call_of_a_loop(plane, number)

    async def broken() -> None:
        calls = asyncio.gather(*map(call, range(4)))
        await asyncio.sleep(0.5)
        await asyncio.gather(*(server.drop_connections.remote() for server in plane.servers))
        await calls

    asyncio.run(asyncio.wait_for(broken(), 60))
    assert ray.get(plane.first.checked_metrics.remote())["fleet/serving"] == 2
    ray.kill(plane.servers[1])
    asyncio.run(asyncio.wait_for(call_of_a_loop(plane, 9), 60))
    metrics = ray.get(plane.first.checked_metrics.remote())
    assert (metrics["fleet/serving"], metrics["fleet/dead"]) == (1, 1)
    plane.kill(0)
    metrics = ray.get(plane.first.checked_metrics.remote())
    assert (metrics["fleet/serving"], metrics["fleet/dead"]) == (1, 1)


def check_groups_that_fail(plane: Plane) -> None:
    for failure in ("one", None, "two", "three", "four"):
        count = ray.get(plane.first.wait_for_groups.remote(-1, 1.0))
        ray.get(plane.first.notify_group_ended.remote(GroupEnd(failure)))
        assert count >= 0
    with pytest.raises(GroupsFailedError, match="four") as caught:
        ray.get(plane.first.wait_for_groups.remote(-1, 1.0))
    assert "3 groups" in str(caught.value) and "max_failed_groups=6" in str(caught.value)
