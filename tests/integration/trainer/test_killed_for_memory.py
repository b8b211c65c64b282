"""An actor that Ray's memory monitor has killed is dead for the trainer, and the error of a run names the kill.

No actor runs here: the tests are in this folder since these modules import torch.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from omegaconf import OmegaConf
from support.actor_death import KILLED, actor, killed_for_memory, replies_raise, unavailable

from seamless_verl.config.schema import WatchdogConfig
from seamless_verl.data_plane.server_calls import ServerCall
from seamless_verl.errors import ActorLostError
from seamless_verl.runtime.waits import WaitKind

pytestmark = pytest.mark.integration


@pytest.fixture
def put_to_sleep() -> Any:
    """Imported before the test: vLLM, which comes with it, takes the log's handlers away."""
    from seamless_verl.trainer.setup import put_to_sleep

    return put_to_sleep


def calls_of(*names: str) -> Any:
    """Calls of these servers, which have all ended."""
    return SimpleNamespace(call=lambda servers: {name: ServerCall(None, object(), 0.0) for name in names})


def test_its_memory_needs_not_be_put_away(
    put_to_sleep: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="seamless_verl")  # vLLM sets the root's to errors
    replies_raise(monkeypatch, killed_for_memory())
    put_to_sleep(calls_of("replica-0 0"), [])
    assert caplog.messages[-1] == f"replica-0 0 is dead, and has no memory to put away: {KILLED}"
    replies_raise(monkeypatch, unavailable())
    with pytest.raises(ray.exceptions.ActorUnavailableError):
        put_to_sleep(calls_of("replica-0 0"), [])


def test_it_is_dead_and_one_that_is_unavailable_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from seamless_verl.trainer.servers import is_dead

    for error, dead in ((killed_for_memory(), True), (unavailable(), False)):
        replies_raise(monkeypatch, error)
        assert is_dead(actor("__ray_ready__"), 1.0) is dead


def test_a_run_that_needs_it_ends_with_its_name_and_the_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    from seamless_verl.trainer.deaths import DeathWatch

    watch = DeathWatch(lambda: {"reward worker 0": actor("__ray_call__")})
    replies_raise(monkeypatch, unavailable())
    watch.check()
    replies_raise(monkeypatch, killed_for_memory())
    with pytest.raises(ActorLostError) as lost:
        watch.check()
    assert lost.value.actors == "reward worker 0" and lost.value.reason == KILLED


def test_no_clock_is_read_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from seamless_verl.trainer.deaths import clock_warnings

    replies_raise(monkeypatch, killed_for_memory())
    assert clock_warnings({"actor worker 0": actor("__ray_call__")}) == []


def test_a_data_plane_that_was_killed_gives_no_replica_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from seamless_verl.trainer.deaths import Recoveries

    replies_raise(monkeypatch, killed_for_memory())
    replica: Any = SimpleNamespace(name="replica-0", kind=WaitKind.REPLICA, what="has given no token", waited_s=9.0)
    blocked: Any = SimpleNamespace(over=replica, culprit=replica)
    assert not Recoveries(actor("give_up"), None).give_up(blocked)
    assert caplog.messages[-1].endswith(f"replica-0 is not given up: {KILLED}")


def test_a_training_that_it_fails_looks_for_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from seamless_verl.trainer import task_runner as module

    def raising(training: Any) -> None:
        raise killed_for_memory()

    sought: list[BaseException] = []
    deaths = SimpleNamespace(check=None, check_soon=sought.append, silent_s=None)
    watchdog = SimpleNamespace(train=raising, enter_stage=None, stage_s=None, without_progress_s=None)
    for name, made in (("NodeWatch", SimpleNamespace(describe=None, check=None)), ("DeathWatch", deaths)):
        monkeypatch.setattr(module, name, lambda *_, made=made: made)
    monkeypatch.setattr(module, "Watchdog", lambda *_, **__: watchdog)
    monkeypatch.setattr(module, "clock_warnings", lambda actors: [])
    monkeypatch.setattr(module, "StuckWatch", lambda *_, **__: SimpleNamespace(metrics=None))
    runner: Any = object.__new__(module.SeamlessTaskRunner)
    runner.agent_loop_manager, checked = None, SimpleNamespace(raise_failed=None)
    runner.trainer = SimpleNamespace(
        data_plane=SimpleNamespace(actors=[None], actor=None),
        seamless=SimpleNamespace(watchdog=WatchdogConfig()),
        pools=None,
        training_actors=dict,
        watched_actors=dict,
        commit=SimpleNamespace(raise_failed=None, under_way=None),
        starter=checked,
        report=checked,
    )
    with pytest.raises(ray.exceptions.OutOfMemoryError):
        runner.train_watched(lambda: None)
    assert [type(error) for error in sought] == [ray.exceptions.OutOfMemoryError]


def test_a_task_runner_that_was_killed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import verl.trainer.main_ppo
    import verl.trainer.ppo.utils
    import verl.utils.config
    import verl.utils.device

    from seamless_verl.main_ppo import train

    def raising(config: Any, runner: Any) -> None:
        raise killed_for_memory()

    monkeypatch.setattr(verl.trainer.main_ppo, "run_ppo", raising)
    monkeypatch.setattr(verl.utils.config, "validate_config", lambda *_: None)
    monkeypatch.setattr(verl.utils.device, "auto_set_device", lambda config: None)
    for name in ("need_critic", "need_reference_policy"):
        monkeypatch.setattr(verl.trainer.ppo.utils, name, lambda config: False)
    with pytest.raises(ActorLostError) as lost:
        train(OmegaConf.create({"trainer": {"v1": {"trainer_mode": "seamless"}}}))
    assert lost.value.actors == "the task runner" and lost.value.reason == KILLED
