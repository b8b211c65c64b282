"""A server, or a holder of sockets, that Ray's memory monitor has killed is lost, and no error of who calls it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray
from support.actor_death import KILLED, killed_for_memory, replies_raise

from seamless_verl.data_plane.client import living_replies
from seamless_verl.data_plane.connections import ActorControl
from seamless_verl.data_plane.restart import held_sockets
from seamless_verl.data_plane.server_calls import ServerCall
from seamless_verl.errors import ReplicaLostError
from seamless_verl.rollout.engine import PauseMode


async def killed(*_: Any) -> None:
    raise killed_for_memory()


METHOD = SimpleNamespace(remote=killed)


async def test_a_command_says_that_the_replica_is_lost() -> None:
    server = SimpleNamespace(pause=METHOD, resume=METHOD, cache_use=METHOD, update_weights=METHOD)
    control = ActorControl("replica-0", server)
    for command in (
        control.pause(PauseMode.KEEP),
        control.resume(),
        control.cache_use(),
        control.update_weights(1, []),
    ):
        with pytest.raises(ReplicaLostError) as lost:
            await command
        assert lost.value.reason == KILLED


def test_its_server_is_no_living_reply(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    replies_raise(monkeypatch, killed_for_memory())
    assert list(living_replies([ServerCall(None, object(), 0.0)])) == []
    assert caplog.messages == [f"a replica's server is dead: {KILLED}"]


async def test_its_sockets_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get_actor", lambda name: SimpleNamespace(send_copies=METHOD))
    assert await held_sockets("holder") == []
