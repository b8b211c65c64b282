"""The actor class of the trainer's workers: the end of a staging is reported while the worker computes."""

from __future__ import annotations

import threading

import pytest
import ray
from support.ends import cluster
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs

pytestmark = pytest.mark.integration
LIMIT_S = 120


def test_a_staging_is_reported_while_the_worker_computes() -> None:
    from seamless_verl.trainer.workers import STAGING, with_staging_group

    class Workers:  # in here it is sent to the actor's process, which cannot import this file
        """As verl names the methods of several workers in one actor."""

        def __init__(self) -> None:
            self.reported = threading.Event()

        async def actor_rollout_send_staged(self) -> None:
            """As in the real one: it makes Ray run all methods in one event loop."""

        def actor_rollout_update_actor(self) -> bool:
            return self.reported.wait(LIMIT_S)

        def actor_rollout_finish_staging(self) -> str:
            self.reported.set()
            return threading.current_thread().name

    with cluster():
        made = with_staging_group(RayClassWithInitArgs(cls=ray.remote(Workers)))
        actor = made.cls.options(num_cpus=0).remote()
        updated = actor.actor_rollout_update_actor.remote()
        assert STAGING in ray.get(actor.actor_rollout_finish_staging.remote(), timeout=LIMIT_S)
        assert ray.get(updated), "the report waited for the computation"


def test_a_class_without_weights_to_stage_is_left_as_it_is() -> None:
    from seamless_verl.trainer.workers import with_staging_group

    class Critic:
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def critic_train_mini_batch(self) -> None:
            pass

    made = ray.remote(Critic)
    assert with_staging_group(RayClassWithInitArgs(cls=made)).cls is made
