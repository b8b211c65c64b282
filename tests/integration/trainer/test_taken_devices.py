"""A lost replica takes devices on another node, which may go away at that moment."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from seamless_verl.trainer import servers

pytestmark = pytest.mark.integration


class Replica(SimpleNamespace):
    """One that verl would give devices; `ready` is when it has them."""

    def __init__(self, ready: threading.Event) -> None:
        super().__init__(workers=["old"], resource_pool=None, ready=ready, launched=0)

    async def init_standalone(self) -> None:
        self.ready.wait()
        self.workers = ["new"]
        await self.launch_servers()

    async def launch_servers(self) -> None:
        self.launched += 1


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(servers, "release_devices", lambda replica: None)
    made = object.__new__(servers.SeamlessServers)
    made.pools, made.taking = None, threading.Lock()
    return made


def test_devices_are_taken_without_a_launch(manager: Any) -> None:
    replica = Replica(threading.Event())
    replica.ready.set()
    manager._take_devices(replica)
    assert replica.workers == ["new"] and replica.launched == 0
    assert replica.launch_servers.__func__ is Replica.launch_servers, "the launch follows"


def test_devices_that_never_come_hold_up_no_other_replica(manager: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[object] = []
    monkeypatch.setattr(servers, "remove_groups_of", removed.append)
    stuck, other = Replica(threading.Event()), Replica(threading.Event())
    other.ready.set()
    with monkeypatch.context() as soon:
        soon.setattr(servers, "TAKE_S", 0.2)
        with pytest.raises(TimeoutError):
            manager._take_devices(stuck)
    assert removed == [stuck]
    manager._take_devices(other)
    assert other.workers == ["new"]
    stuck.ready.set()
    for thread in threading.enumerate():
        if thread.name == "taking devices":
            thread.join(10)
    assert stuck.launched == 0, "what comes too late launches nothing"


def test_what_a_replica_reserved_is_removed_under_the_names_of_both_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table has the groups of all jobs; those of others cannot be found by name."""
    own = {"rollout_pool_3:group 0:0": "PENDING", "rollout_pool_3verl_group_1:0": "CREATED"}
    others = ["rollout_pool_30:group 0:0", "rollout_pool_30verl_group_1:0", "rollout_pool_reward_3verl_group_1:0"]
    table = [("rollout_pool_3:group 9:0", "PENDING"), ("rollout_pool_3:group 0:1", "REMOVED"), *own.items()]
    table += [(name, "PENDING") for name in others]

    def by_name(name: str) -> str:
        if name == "rollout_pool_3:group 9:0":
            raise ValueError("Failed to look up placement group")
        return name

    removed: list[str] = []
    rows = {str(i): {"name": name, "state": state} for i, (name, state) in enumerate(table)}
    monkeypatch.setattr(servers, "placement_group_table", lambda: rows)
    monkeypatch.setattr(servers, "get_placement_group", by_name)
    monkeypatch.setattr(servers, "remove_placement_group", removed.append)
    servers.remove_groups_of(SimpleNamespace(replica_rank=3, name_suffix=""))
    assert removed == list(own)
