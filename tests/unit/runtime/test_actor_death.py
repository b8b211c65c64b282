"""Which of Ray's errors say that an actor is gone, and what a user reads of them."""

from __future__ import annotations

import pytest
import ray
from support.actor_death import KILLED, killed_for_memory, unavailable

from seamless_verl.runtime.actor_death import ACTOR_GONE, death_reason, last_line

OTHERS = (
    ray.exceptions.OutOfMemoryError("of the memory monitor"),
    ray.exceptions.ActorUnschedulableError("its node is dead"),
    ray.exceptions.RuntimeEnvSetupError("no such folder"),
)


@pytest.mark.parametrize("error", OTHERS, ids=lambda error: type(error).__name__)
def test_a_death_may_be_no_actor_error(error: Exception) -> None:
    """If Ray makes them RayActorErrors, ACTOR_GONE needs them no more."""
    assert isinstance(error, ACTOR_GONE) and not isinstance(error, ray.exceptions.RayActorError)


def test_a_slow_reply_and_an_error_of_the_actors_own_are_no_deaths() -> None:
    assert not issubclass(ray.exceptions.GetTimeoutError, ACTOR_GONE)
    assert not issubclass(ray.exceptions.RayTaskError, ACTOR_GONE)


def test_a_kill_by_the_memory_monitor_is_named_in_one_line() -> None:
    assert death_reason(killed_for_memory()) == last_line(killed_for_memory()) == KILLED


def test_a_kill_with_another_text_is_named_too() -> None:
    reason = death_reason(ray.exceptions.OutOfMemoryError("all\nis used"))
    assert reason == "it was killed: its node was short of memory. all is used"


def test_other_deaths_have_rays_reason() -> None:
    died = ray.exceptions.RayActorError(error_msg="The actor died.\n\tpid: 7\nIt was killed by `ray.kill`.\n")
    assert death_reason(died) == str(died) and last_line(died) == "It was killed by `ray.kill`."
    assert "the network was away" in death_reason(unavailable())
