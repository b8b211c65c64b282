"""The end of a run: a part that does not end is logged, and all other parts are ended."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from support.ends import Ending, Failing, await_death, cluster, kill, started

from seamless_verl.agent_loops import manager as loops
from seamless_verl.agent_loops.manager import SeamlessAgentLoopManager
from seamless_verl.data_plane.client import PlacedReplica
from seamless_verl.trainer import servers, task_runner
from seamless_verl.trainer.servers import SeamlessServers
from seamless_verl.trainer.task_runner import SeamlessTaskRunner

pytestmark = [pytest.mark.integration, pytest.mark.slowest(9)]
WAITED_S = 10.0  # seconds for actors that end, which they do at once


@pytest.fixture(scope="module", autouse=True)
def ray_cluster() -> Iterator[None]:
    with cluster():
        yield


@pytest.fixture
def actors() -> dict[str, Any]:
    """An actor that ends, and actors that do not, for different reasons."""
    kinds = {"ends": Ending, "fails": Failing, "holds": Ending, "dead": Ending}
    made = {name: started(kind) for name, kind in kinds.items()}
    made["holds"].hold.remote()
    kill(made["dead"])
    return made


def test_agent_loop_workers_that_do_not_stop_are_named_and_killed(
    actors: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loops, "STOP_S", WAITED_S / 2)
    manager = object.__new__(SeamlessAgentLoopManager)
    manager.agent_loop_workers = list(actors.values())
    manager.stop()
    assert ray.get(actors.pop("ends").stop.remote(), timeout=60) == "stopped"
    assert len(caplog.messages) == len(actors)
    for actor in actors.values():
        assert any(repr(actor) in message for message in caplog.messages)
        await_death(actor)


def test_replicas_that_do_not_end_are_named_and_fail_nothing(
    actors: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(servers, "STOP_S", WAITED_S)
    manager = object.__new__(SeamlessServers)
    manager.placed = [
        PlacedReplica(SimpleNamespace(server_handle=actor, replica_rank=rank), False, ())  # type: ignore[arg-type]
        for rank, actor in enumerate(actors.values())
    ]
    manager.stop()
    named = [message.partition(" did not end in order: ")[0] for message in caplog.messages]
    assert named == [f"replica-{rank}" for rank, name in enumerate(actors) if name != "ends"]


class Parts:
    """The parts of a run; each records that it ended, and then fails."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    def part(self, name: str) -> Any:
        def end(**_: Any) -> None:
            self.ended.append(name)
            raise RuntimeError(name)

        return end

    def trainer(self) -> Any:
        parts = {"logger": "finish", "device_time": "finish", "starter": "close"}
        parts |= {"data_plane": "stop", "servers": "stop"}
        return SimpleNamespace(**{name: SimpleNamespace(**{end: self.part(name)}) for name, end in parts.items()})


def close_errors(parts: Parts, monkeypatch: pytest.MonkeyPatch, manager: Any, *, succeeded: bool) -> list[str]:
    """The errors that a run raises at its end, the last one first."""
    monkeypatch.setattr(task_runner.tq, "close", parts.part("queue"))
    runner = SeamlessTaskRunner()
    runner.trainer, runner.agent_loop_manager = parts.trainer(), manager
    with pytest.raises(RuntimeError) as raised:
        runner.close(succeeded)
    chain: list[BaseException] = [raised.value]
    while chain[-1].__context__ is not None:
        chain.append(chain[-1].__context__)
    return [str(error) for error in chain]


def test_every_part_of_a_run_is_ended_even_if_others_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts()
    manager = object.__new__(SeamlessAgentLoopManager)
    manager.agent_loop_workers = ["no actor"]
    raised = close_errors(parts, monkeypatch, manager, succeeded=True)
    assert parts.ended == ["logger", "queue", "device_time", "starter", "data_plane", "servers"]
    assert raised[:6] == parts.ended[::-1] and "no attribute 'stop'" in raised[6]


def test_a_failed_run_ends_what_outlives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts()
    assert close_errors(parts, monkeypatch, None, succeeded=False) == ["queue", "logger"]


def test_stop_of_a_custom_manager_is_not_called(actors: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts()
    worker = actors["ends"]
    manager = SimpleNamespace(stop=parts.part("the user's own"), agent_loop_workers=[worker])
    assert close_errors(parts, monkeypatch, manager, succeeded=True) == parts.ended[::-1]
    assert "the user's own" not in parts.ended
    await_death(worker)
