"""Activity reports of real actors, and the loss that stands for an actor that died."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray
from support.ends import Ending, Failing, cluster, kill, started

from seamless_verl.trainer.device_time import LostSource, reply_or_loss

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module", autouse=True)
def ray_cluster() -> Iterator[None]:
    with cluster():
        yield


def test_a_dead_actor_is_a_lost_source(caplog: pytest.LogCaptureFixture) -> None:
    dead, killed = started(Ending), started(Ending)
    kill(dead)
    running = killed.hold.remote()
    ray.kill(killed)
    assert reply_or_loss("replica-0", dead.stop.remote()) == LostSource("replica-0")
    assert reply_or_loss("replica-1", running) == LostSource("replica-1")
    first, second = caplog.messages
    assert first.startswith("replica-0 is dead and reports no more activity: ") and second.startswith("replica-1 is")


def test_a_living_actor_has_its_own_reply_or_error() -> None:
    assert reply_or_loss("replica-0", started(Ending).stop.remote()) == "stopped"
    with pytest.raises(ValueError, match="it cannot"):
        reply_or_loss("replica-0", started(Failing).stop.remote())
