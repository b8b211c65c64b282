"""The error of a run that lost a node names the node, its group and its labels; real raylets, and actors that idle."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import ray
from omegaconf import OmegaConf
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from support.cluster import cluster
from support.paths import child_environment
from support.resources import group, plan

from seamless_verl.errors import ActorLostError, ConfigError
from seamless_verl.resources.machines import machines_of, runner_node
from seamless_verl.trainer import task_runner
from seamless_verl.trainer.deaths import DeathWatch, NodeWatch, clock_warnings
from seamless_verl.trainer.pools import cluster_nodes
from seamless_verl.trainer.task_runner import PlacedTaskRunner

pytestmark = [pytest.mark.integration, pytest.mark.long]
END_S = 60.0
PLAN = plan(group(1, 1, "train", name="learners", does="train"), group(1, 1, "rollout", name="engines"))
NAMED = r"node [\d.]+ \(\w{8}, 1 devices, does=train\) is gone"


def test_a_lost_node_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with cluster(monkeypatch) as nodes:
        head = nodes.add("head", cpus=4)
        far = nodes.add("far", devices=1, cpus=4, labels={"does": "train"})
        ray.init(address=nodes.address, log_to_driver=False, runtime_env={"env_vars": child_environment()})
        try:
            actors = {name: placed(node) for name, node in (("actor worker 0", far), ("the loop", head))}
            ray.get([actor.nothing.remote() for actor in actors.values()])
            watch = NodeWatch(lambda: {far: [machines_of(PLAN)[0]]})
            deaths = DeathWatch(lambda: actors, watch.describe)
            await_replies(deaths, set(actors))
            assert clock_warnings(actors) == []
            refuse_and_place(monkeypatch, head)
            runner = PlacedTaskRunner(OmegaConf.create())
            runner.node = runner_node(PLAN, far, cluster_nodes())
            assert runner.node is not None and runner.node.node_id == far
            runner.machines = {far: [machines_of(PLAN)[0]]}
            call = actors["actor worker 0"].nothing.remote
            nodes.kill("far")
            lost = loss_of(deaths)
            assert lost.actors == "actor worker 0"
            nodes.add("new", devices=1, cpus=4, labels={"does": "train"})
            watch.check()
            assert [node.leaving for node in cluster_nodes()] == [False, False]
            nodes.drain("new")
            assert [node.leaving for node in cluster_nodes()] == [name != head for name in sorted_ids()]
            with pytest.raises(ray.exceptions.RayActorError) as died:
                ray.get(call())
            text = str(runner.lost(died.value))
        finally:
            ray.shutdown()
    assert re.match(NAMED, lost.reason)
    assert "it was a machine of learners (1 devices, tags train, label does=train)" in lost.reason
    assert re.match(f"the task runner died: {NAMED}; it was a machine of learners", text)
    assert any("has joined (1 devices, does=train)" in message for message in caplog.messages)


def sorted_ids() -> list[str]:
    return [node.node_id for node in cluster_nodes()]


def refuse_and_place(monkeypatch: pytest.MonkeyPatch, head: str) -> None:
    """A machine that the cluster has not is refused before anything starts; else the task runner is here."""
    for label in ("moon", "train"):
        plans = plan(group(1, 1, "train", "rollout", name="all", does=label))
        monkeypatch.setattr(task_runner, "plan_by_tags", lambda config, plans=plans: plans)
        runner = PlacedTaskRunner(OmegaConf.create())
        if label == "moon":
            with pytest.raises(
                ConfigError, match=r"no node has the label does=moon \(the cluster has 1 devices.*train"
            ):
                runner.options()
        else:
            runner.options()
            assert runner.node is not None and runner.node.node_id == head


def placed(node: str) -> Any:

    class Idle:  # in here it is sent to the actor's process, which cannot import this file
        def nothing(self) -> None: ...

    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(Idle).options(num_cpus=0, scheduling_strategy=strategy).remote()


def await_replies(deaths: DeathWatch, names: set[str]) -> None:
    """Until each has said where it is, for which its process imports much."""
    deadline = time.monotonic() + END_S
    while deaths.nodes.keys() != names:
        assert time.monotonic() < deadline, "an actor does not reply"
        deaths.check()
        time.sleep(0.2)


def loss_of(deaths: DeathWatch) -> ActorLostError:
    deadline = time.monotonic() + END_S
    while True:
        assert time.monotonic() < deadline, "no death was seen"
        try:
            deaths.check()
        except ActorLostError as error:
            return error
        time.sleep(0.5)  # as the watchdog looks every few seconds
