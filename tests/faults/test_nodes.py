"""A run on a cluster of three raylets with labels: one that only generates is killed, and another one joins later.

Agents are held back while Ray finds out that the node is dead, and while the replica starts on the new one, so that
nothing here depends on how fast the machine is.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.cluster import Nodes, cluster
from support.job import AGENT, Job

from seamless_verl.journal import JournalReader
from seamless_verl.platform.forkserver import launcher

pytestmark = [pytest.mark.integration, pytest.mark.long]
STEPS = 12
RESOURCES = (
    "[{name: learners, count: 1, devices: 1, tags: [train], labels: {does: train}},"
    " {name: engines, count: COUNT, devices: 1, tags: [rollout], labels: {does: rollout}}]"
)
NEEDED = {  # by a run: none of these may be where only replicas are
    *("SeamlessTaskRunner", "DataPlane", "SocketHolder", "SeamlessAgentLoopWorker", "RewardLoopWorker"),
    *("TransferQueueController", "SimpleStorageUnit", "GlobalRequestLoadBalancer"),
}
# Forks workers, as a run's own cluster does; without it each of the processes imports everything anew.
FORKS = f'\'"{sys.executable}" -IS "{launcher.__file__}"\''


def job_on(nodes: Nodes, folder: Path, data: Path, *, engines: int, **options: Any) -> Job:
    """It gets the address alone, as in the shell of a user: no platform, and no setting of the cluster."""
    overrides = AGENT | {
        "seamless__resources": RESOURCES.replace("COUNT", str(engines)),
        "seamless__max_staleness": 0,
        "seamless__restarts": 3,
        "actor_rollout_ref__rollout__checkpoint_engine__backend": "gloo",
        "actor_rollout_ref__rollout__agent__default_agent_loop": "held_at_end",
        "+ray_kwargs__ray_init__runtime_env__env_vars__VERL_FILE_LOGGER_PATH": folder / "metrics.jsonl",
        "ray_kwargs__ray_init__runtime_env__py_executable": FORKS,
        "trainer__total_training_steps": STEPS,
    }
    return Job(folder, data, overrides | options, {"RAY_ADDRESS": nodes.address, "VERL_PLATFORM": ""})


def last_step(job: Job) -> int:
    return max(map(int, re.findall(r"\bstep:(\d+) ", job.log())))


def test_a_run_goes_on_when_a_node_goes_and_another_comes(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = tmp_path / "held"
    monkeypatch.setenv("HELD_WHILE_EXISTS", str(held))
    with cluster(monkeypatch) as nodes:
        nodes.add("head", devices=1, labels={"does": "train"})
        for name in ("one", "two"):
            nodes.add(name, devices=1, labels={"does": "rollout"})
        job = job_on(nodes, tmp_path, nano, engines=2).start()
        job.wait_for("step:1 ")
        assert nodes.actors("head") >= NEEDED
        for name in ("one", "two"):
            assert "SeamlessServer" in nodes.actors(name) and not NEEDED & nodes.actors(name)
        held.touch()
        ending = nodes.kill("two")
        job.wait_for("waits for devices, since its own are gone: a machine of engines")
        held.unlink()
        lost_at = last_step(job)
        job.wait_for(f"step:{lost_at + 2} ")
        held.touch()
        nodes.add("three", devices=1, labels={"does": "rollout"})
        job.wait_for("is back after")
        back_at = last_step(job)
        held.unlink()
        steps = job.finish().metrics()
        assert not psutil.wait_procs(ending, timeout=60)[1], "what is left of the node keeps its devices' memory"
    assert lost_at + 2 <= back_at <= STEPS - 2, "no steps with the node away, or with the new one"
    check_steps(steps, job.log())
    assert check_journal(job) == {"replica-0", "replica-1"}


def check_steps(steps: dict[int, dict[str, float]], log: str) -> None:
    """The account closes at every step, and at the last one both replicas serve on their devices."""
    assert steps.keys() == set(range(1, STEPS + 1))
    last = steps[STEPS]
    assert (last["fleet/dead"], last["fleet/serving"]) == (0, 2)
    lost = last["replicas/lost/died"] + last["replicas/lost/unreachable"]  # the second if Ray takes long to know
    assert (lost, last["replicas/returned"], last["replicas/abandoned"]) == (1, 1, 0)
    (name,) = set(re.findall(r"replica-(\d) is back after", log))
    assert last[f"seamless/device/rollout-{name}/rollout_share"] > 0, "the new node's replica generates nothing"
    for metrics in steps.values():
        assert metrics["training/rollout_logprob_diff_max"] < 2e-2
        assert metrics["training/off_policy/trajectory_staleness_worst/max"] == 0
        assert metrics["calls/failed"] == 0
        dropped = sum(count for key, count in metrics.items() if key.startswith("tokens/dropped/"))
        assert metrics["tokens/generated"] == metrics["tokens/trained"] + dropped > 0
    assert re.search(r"node [\d.]+ \(\w{8}, .*does=rollout\) is gone; it was a machine of engines", log)
    assert re.search(r"node [\d.]+ has joined \(1 devices.*, does=rollout\)", log)
    assert "RAY_ADDRESS=" in log and "this run is on the CPU platform" in log


def check_journal(job: Job) -> set[str]:
    """The replicas that generated the tokens of the sessions which began last."""
    reader = JournalReader(job.folder / "checkpoints" / "trajectories.sqlite")
    last = [session for session in reader.sessions() if session.reason == "finished"][-2 * 8 * 4 :]
    records = [record for session in last if (record := reader.read(session.session_id)) is not None]
    return {segment.replica for record in records for call in record.calls for segment in call.turn().segments}
