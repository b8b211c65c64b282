"""Which lost replicas are started again: waits, limit and counts, at any order of deaths and failed starts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.rollout.restarts import (
    FIRST_WAIT_S,
    LONGEST_WAIT_S,
    STABLE_S,
    LossReason,
    Restarts,
    RestartStage,
    wait_s,
)

NAMES = ("r0", "r1")
WAITING, STARTING, STARTED = RestartStage.WAITING, RestartStage.STARTING, RestartStage.STARTED
SERVING, ABANDONED = RestartStage.SERVING, RestartStage.ABANDONED


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def come_back(restarts: Restarts, name: str) -> None:
    restarts.begin(name)
    restarts.started(name)
    restarts.came_back(name)


def test_a_first_loss_is_made_good_at_once_and_a_second_one_waits() -> None:
    clock = Clock()
    restarts = Restarts(NAMES, limit=3, clock=clock)
    assert restarts.lost("r0", LossReason.DIED) is WAITING and restarts.due() == ["r0"]
    come_back(restarts, "r0")
    assert restarts.stage("r0") is SERVING and restarts.due() == []
    restarts.lost("r0", LossReason.LATE)
    assert restarts.due() == [] and restarts.next_start_s("r0") == FIRST_WAIT_S
    clock.now += FIRST_WAIT_S
    assert restarts.due() == ["r0"]


def test_waits_double_up_to_the_longest() -> None:
    assert [wait_s(starts) for starts in range(4)] == [0, FIRST_WAIT_S, 2 * FIRST_WAIT_S, 4 * FIRST_WAIT_S]
    assert wait_s(100) == LONGEST_WAIT_S


def test_a_replica_is_abandoned_after_its_last_start() -> None:
    clock = Clock()
    restarts = Restarts(NAMES, limit=2, clock=clock)
    restarts.lost("r0", LossReason.DIED)
    assert restarts.begin("r0") == 1 and restarts.failed("r0") is WAITING
    clock.now += FIRST_WAIT_S
    assert restarts.begin("r0") == 2 and restarts.failed("r0") is ABANDONED
    clock.now += 10 * LONGEST_WAIT_S
    assert restarts.due() == [] and restarts.lost("r0", LossReason.DIED) is ABANDONED
    assert restarts.metrics()["replicas/abandoned"] == 1 and restarts.metrics()["replicas/failed_starts"] == 2


def test_with_a_limit_of_none_no_replica_is_started_again() -> None:
    restarts = Restarts(NAMES, limit=0)
    assert restarts.lost("r0", LossReason.DIED) is ABANDONED and restarts.due() == []


def test_starts_count_anew_after_a_replica_served_for_long() -> None:
    restarts = Restarts(NAMES, limit=1, clock=Clock())
    for _ in range(3):
        assert restarts.lost("r0", LossReason.DIED, STABLE_S) is WAITING and restarts.due() == ["r0"]
        come_back(restarts, "r0")
    assert restarts.lost("r0", LossReason.DIED, STABLE_S / 2) is ABANDONED


def test_a_replica_that_came_back_and_never_served_is_abandoned_however_late_it_is_lost() -> None:
    """Training has its device for long, and it dies when it gets it back."""
    clock = Clock()
    restarts = Restarts(NAMES, limit=1, clock=clock)
    restarts.lost("r0", LossReason.DIED)
    come_back(restarts, "r0")
    clock.now += 100 * STABLE_S
    assert restarts.lost("r0", LossReason.DIED, 1.0) is ABANDONED


def test_the_time_for_which_a_replica_hung_is_no_time_that_it_served() -> None:
    seen_s = 600.0
    restarts = Restarts(NAMES, limit=1, clock=Clock(), noticed_s={LossReason.STUCK: seen_s})
    for served_s, stage in ((STABLE_S, WAITING), (STABLE_S, WAITING), (STABLE_S - 1, ABANDONED)):
        assert restarts.lost("r0", LossReason.STUCK, seen_s + served_s) is stage
        if stage is WAITING:
            come_back(restarts, "r0")


def test_losses_are_counted_once_by_their_reason() -> None:
    clock = Clock()
    restarts = Restarts(NAMES, limit=3, clock=clock)
    for _ in range(2):  # a loss is reported until the replica is back
        restarts.lost("r0", LossReason.UNREACHABLE)
    restarts.lost("r1", LossReason.LATE)
    clock.now += 7.0
    come_back(restarts, "r0")
    metrics = restarts.metrics()
    lost = {name: metrics[f"replicas/lost/{name}"] for name in LossReason}
    assert lost == {"died": 0, "unreachable": 1, "late": 1, "stuck": 0}
    assert (metrics["replicas/returned"], metrics["replicas/waiting"], metrics["replicas/away_s"]) == (1, 1, 7)


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(["lose", "start", "end", "fail", "wait"]))))
def test_every_loss_is_accounted_for(steps: list[tuple[str, str]]) -> None:
    clock = Clock()
    restarts = Restarts(NAMES, limit=2, clock=clock)
    for name, step in steps:
        stage = restarts.stage(name)
        if step == "lose":
            restarts.lost(name, LossReason.DIED)
        elif step == "start" and name in restarts.due():
            assert restarts.begin(name) <= restarts.limit
        elif step == "end" and stage is STARTING:
            restarts.started(name)
        elif step == "end" and stage is STARTED:
            restarts.came_back(name)
        elif step == "fail" and stage in (STARTING, STARTED):
            assert restarts.failed(name) in (WAITING, ABANDONED)
        elif step == "wait":
            clock.now += FIRST_WAIT_S
        restarts.check_integrity()
        assert sum(restarts.metrics()[f"replicas/{one}"] for one in (WAITING, STARTING, STARTED, ABANDONED)) == sum(
            restarts.stage(one) is not SERVING for one in NAMES
        )
