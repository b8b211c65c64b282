"""A run that lost an actor without which it would wait for ever ends within seconds, and names it."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
import ray
from support.job import Job
from support.paths import child_environment

from seamless_verl.errors import ActorLostError
from seamless_verl.trainer.deaths import DeathWatch

pytestmark = [pytest.mark.integration, pytest.mark.long]
STEPS = {"trainer.total_training_steps": 50, "seamless.max_staleness": 0, "seamless.restarts": 0}
END_S = 60.0  # with the end of all other processes; the death itself is seen within CHECKS_S


@pytest.mark.parametrize(
    ("process", "named"),
    [
        ("AgentLoopWorker", "agent loop worker 0"),
        ("SimpleStorageUnit", "TransferQueue storage 0"),
        ("TransferQueueController", "TransferQueue controller"),
    ],
)
def test_a_run_ends_with_the_name_of_what_it_lost(nano: Path, tmp_path: Path, process: str, named: str) -> None:
    job = Job(tmp_path, nano, STEPS)
    job.start()
    job.wait_for("step:1 ")
    (found,) = [one for one in job.descendants() if process in " ".join(one.cmdline())][:1]
    found.send_signal(signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(AssertionError, match=f"{named} died"):
        job.finish()
    assert time.monotonic() - began < END_S


def test_a_busy_actor_lives_and_a_dead_one_is_named() -> None:

    class Actor:  # in here it is sent to the actor's process, which cannot import this file
        def compute(self, seconds: float) -> None:
            time.sleep(seconds)

    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": child_environment()})
    try:
        actors = {name: ray.remote(Actor).options(num_cpus=0).remote() for name in ("idle", "busy", "dead")}
        ray.get([actor.compute.remote(0) for actor in actors.values()])
        watch = DeathWatch(lambda: actors)
        actors["busy"].compute.remote(60)
        for _ in range(3):
            watch.check()
        assert "busy" in watch.silent_s(), "it has not replied since it computes"
        ray.kill(actors["dead"])
        limit = time.monotonic() + 20
        with pytest.raises(ActorLostError, match=r"^dead died: ") as lost:
            while time.monotonic() < limit:
                watch.check()
        assert lost.value.actors == "dead"
    finally:
        ray.shutdown()
