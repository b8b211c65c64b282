"""Calls of real actors, one of which hangs: it costs the limit once, and its late reply is returned."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from support.ends import Ending, cluster, kill, started
from support.plane import process

from seamless_verl.data_plane.client import living_replies
from seamless_verl.data_plane.server_calls import ServerCalls

pytestmark = pytest.mark.integration
LIMIT_S = 5.0


@pytest.fixture(scope="module", autouse=True)
def ray_cluster() -> Iterator[None]:
    with cluster():
        yield


def pid_of(actor: Any) -> int:
    return int(ray.get(actor.__ray_call__.remote(process)))


def test_a_server_that_hangs_is_absent_until_it_replies(caplog: pytest.LogCaptureFixture) -> None:
    servers = {name: started(Ending) for name in ("replica-0", "replica-1")}
    hanging = pid_of(servers["replica-1"])
    calls = ServerCalls("stop", LIMIT_S)
    os.kill(hanging, signal.SIGSTOP)
    try:
        began = time.monotonic()
        assert calls.call(servers).keys() == {"replica-0"}
        assert time.monotonic() - began >= LIMIT_S
        first = calls.open["replica-1"]
        began = time.monotonic()
        for _ in range(20):
            assert calls.call(servers).keys() == {"replica-0"}
        assert time.monotonic() - began < 20 * LIMIT_S / 2, "it was waited for again"
        assert calls.open["replica-1"].reply == first.reply, "it was called again, before it replied"
        assert sum("replica-1 has not replied to stop for 5 s" in message for message in caplog.messages) == 1
    finally:
        os.kill(hanging, signal.SIGCONT)
    ray.wait([first.reply], timeout=30)
    ended = calls.call(servers)
    assert ended["replica-1"].late and ended["replica-1"].sent == first.sent and not ended["replica-0"].late
    assert list(living_replies(ended.values())) == ["stopped", "stopped"]
    assert not calls.call(servers)["replica-1"].late


def test_a_late_reply_to_a_command_does_not_answer_the_next_one() -> None:
    server = started(Ending)
    hanging = pid_of(server)
    calls = ServerCalls("stop", LIMIT_S, commands=True)
    os.kill(hanging, signal.SIGSTOP)
    try:
        assert calls.call({"replica-0": server}) == {}
        first = calls.open["replica-0"].reply
        calls.begin({"replica-0": server})
        assert calls.open["replica-0"].reply == first, "it was called again, before it replied"
    finally:
        os.kill(hanging, signal.SIGCONT)
    assert ray.wait([first], timeout=30)[0]
    assert calls.end() == {}, "it replied to the earlier command"
    again = calls.call({"replica-0": server})["replica-0"]
    assert again.reply != first and not again.late
    assert list(living_replies([again])) == ["stopped"]


def test_the_server_that_takes_the_place_of_one_that_hangs_is_called() -> None:
    calls, hanging, started_again = ServerCalls("stop", 5.0), started(Ending), started(Ending)
    hanging.hold.remote()
    assert calls.call({"replica-0": hanging}) == {}
    assert list(living_replies(calls.call({"replica-0": started_again}).values())) == ["stopped"]
    ray.kill(hanging)


def test_a_dead_server_is_no_living_reply(caplog: pytest.LogCaptureFixture) -> None:
    dead = started(Ending)
    kill(dead)
    assert list(living_replies(ServerCalls("stop").call({"replica-0": dead}).values())) == []
    assert caplog.messages[-1].startswith("a replica's server is dead: ")
