"""What is over its limit is named once, recovered once, and ends the run if nothing else moves."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.ledger import Clock

from seamless_verl.config.schema import WatchdogConfig
from seamless_verl.errors import NoProgressError
from seamless_verl.runtime.waits import TRAINER, Blocked, Limits, Wait, WaitKind
from seamless_verl.trainer.run_waits import SETTINGS, limits_of
from seamless_verl.trainer.watchdog import StuckWatch

LIMITS: Limits = {WaitKind.REPLICA: 100.0, WaitKind.QUEUE: 100.0}


class Run:
    """A run whose waits a test sets; `recoveries` are those that were tried."""

    def __init__(self, *, recovers: bool = True, limits: Limits = LIMITS) -> None:
        self.clock, self.waits, self.recoveries, self.looks = Clock(), list[Wait](), list[str](), 0
        self.recovers, self.still_s = recovers, 0.0
        self.watch = StuckWatch(
            self.collect,
            limits,
            {WaitKind.REPLICA: self.recover},
            report=lambda blocked: f"the stacks of {blocked.culprit.name}",
            without_progress_s=lambda: self.still_s,
            clock=self.clock,
        )

    def collect(self) -> list[Wait]:
        self.looks += 1
        return self.waits

    def recover(self, blocked: Blocked) -> bool:
        self.recoveries.append(blocked.over.name)
        return self.recovers

    def look(self, *waits: Wait, after_s: float = 10.0, stood_still: bool = False) -> None:
        """After so many seconds, in which it was asked all the time unless its process stood still."""
        self.clock.now += after_s
        if not stood_still:
            self.watch.checked = self.clock.now
        self.waits = list(waits)
        self.watch.check()


def replica(s: float, name: str = "replica-1") -> Wait:
    return Wait(WaitKind.REPLICA, name, s, what="has given none of its calls a token")


def queue(s: float) -> Wait:
    return Wait(WaitKind.QUEUE, "TransferQueue", s, what="has not taken rows")


def test_a_look_is_due_ten_times_within_the_shortest_limit() -> None:
    run = Run()
    for _ in range(20):
        run.look(after_s=5.0)
    assert run.looks == 10


def test_without_limits_nothing_is_asked() -> None:
    run = Run(limits=dict.fromkeys(LIMITS))
    run.look(replica(1e6), after_s=1e6)
    assert run.looks == 0


def test_what_is_over_its_limit_is_named_with_its_stacks_and_recovered_once(caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    for waited in (100.0, 101.0, 111.0):
        run.look(Wait(WaitKind.TRAINER, TRAINER, 5.0, ("replica-1",), "waiting for groups, step 3"), replica(waited))
    (record,) = caplog.records
    assert record.levelno == logging.ERROR and record.getMessage() == (
        "the trainer (waiting for groups, step 3) waits for replica-1, which has given none of its calls a token for "
        "101 s\nthe stacks of replica-1"
    )
    assert run.recoveries == ["replica-1"] and run.watch.metrics()["watchdog/recovery/replica"] == 1


def test_a_recovery_that_is_not_possible_is_asked_for_at_each_look() -> None:
    run = Run(recovers=False)
    run.look(replica(101.0))
    run.recovers = True
    run.look(replica(111.0))
    run.look(replica(121.0))
    assert run.recoveries == ["replica-1"] * 2


def test_many_at_once_have_a_few_lines_and_all_are_recovered(caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    run.look(*(replica(101.0 + i, f"replica-{i}") for i in range(6)))
    assert len(caplog.records) == 5 and caplog.messages[-1] == "2 more are over their limits"
    assert len(run.recoveries) == 6


def test_a_run_ends_only_when_nothing_else_moves_for_as_long_as_the_limit() -> None:
    run = Run()
    run.still_s = 100.0
    run.look(queue(101.0))
    run.still_s = 100.1
    with pytest.raises(NoProgressError, match=r"^TransferQueue has not taken rows for 111 s\n") as caught:
        run.look(queue(111.0))
    assert "100 seconds (2 x seamless.watchdog.transition_s)" in str(caught.value)


def test_a_run_waits_for_a_recovery_before_it_ends() -> None:
    run = Run()
    run.still_s = 1000.0
    run.look(replica(101.0))
    run.look(replica(201.0), after_s=100.0)
    with pytest.raises(NoProgressError, match="replica-1 has given none of its calls a token for 211 s"):
        run.look(replica(211.0))


def test_a_run_whose_recovery_is_not_possible_ends() -> None:
    run = Run(recovers=False)
    run.still_s = 101.0
    with pytest.raises(NoProgressError):
        run.look(replica(101.0))


@pytest.mark.parametrize("kind", [WaitKind.TRAINER, WaitKind.COMPUTING])
def test_a_run_that_waits_for_the_trainers_own_computation_goes_on(kind: WaitKind) -> None:
    run = Run()
    run.still_s = 1000.0
    run.look(Wait(WaitKind.QUEUE, "TransferQueue", 101.0, ("worker 0",)), Wait(kind, "worker 0", 1000.0))


def test_a_group_that_takes_long_does_not_end_the_run() -> None:
    run = Run(limits={WaitKind.GROUP: 100.0})
    run.still_s = 1000.0
    run.look(Wait(WaitKind.GROUP, "group u", 101.0))
    assert run.watch.metrics()["watchdog/named/group"] == 1


def test_what_the_trainer_waits_for_is_said_at_any_time() -> None:
    run = Run()
    run.waits = [Wait(WaitKind.TRAINER, TRAINER, 5.0, ("replica-1",), "computing, step 3"), replica(2.0)]
    assert run.watch.explain().startswith("the trainer (computing, step 3) waits for replica-1, which")


def test_each_limit_has_its_setting() -> None:
    settings = WatchdogConfig(transition_s=5, no_progress_s=600, group_s=7.0)
    limits = limits_of(settings)
    assert limits.keys() == SETTINGS.keys()
    factors = {"": 1.0, "2 x ": 2.0, "half of ": 0.5}
    for kind, text in SETTINGS.items():
        times, _, key = text.partition("seamless.watchdog.")
        assert limits[kind] == factors[times] * getattr(settings, key)


def test_nothing_is_over_its_limit_by_the_seconds_in_which_the_process_stood_still() -> None:
    run = Run()
    run.still_s = 500.0
    run.look(replica(5.0))
    run.look(replica(505.0), queue(505.0), after_s=500.0, stood_still=True)
    assert run.looks == 1 and not run.recoveries
    run.look(replica(3.0), after_s=5.0)
    assert run.looks == 1, "it has had no time to go on"
    run.look(replica(3.0))
    assert run.looks == 2 and not run.recoveries and run.watch.metrics()["watchdog/over_limit"] == 0


def test_a_watch_that_is_always_late_looks_all_the_same() -> None:
    run = Run()
    for _ in range(4):
        run.look(replica(150.0), after_s=100.0, stood_still=True)
    assert run.looks == 3 and run.recoveries == ["replica-1"]


def test_a_part_is_named_again_only_after_it_was_within_its_limit() -> None:
    run = Run(recovers=False)
    run.look(replica(101.0, "a"), replica(101.0, "b"))
    run.look(replica(111.0, "a"))
    assert run.watch.metrics() == {"watchdog/over_limit": 1, "watchdog/named/replica": 2}
    run.look(replica(121.0, "a"), replica(101.0, "b"))
    assert run.watch.metrics() == {"watchdog/over_limit": 2, "watchdog/named/replica": 3}


def test_what_was_recovered_may_be_recovered_again() -> None:
    run = Run()
    for _ in range(2):
        run.look(replica(101.0))
        run.look(replica(5.0))
    assert run.recoveries == ["replica-1"] * 2
    assert run.watch.metrics() == {
        "watchdog/over_limit": 0, "watchdog/named/replica": 2, "watchdog/recovery/replica": 2
    }  # fmt: skip


@given(st.lists(st.tuples(st.sets(st.sampled_from("abc")), st.integers(10, 300)), max_size=20))
def test_no_part_has_two_recoveries_while_it_is_over_its_limit(looks: list[tuple[set[str], int]]) -> None:
    run, tried = Run(), set[str]()
    for found, seconds in looks:
        before = len(run.recoveries)
        run.look(*(replica(101.0, name) for name in sorted(found)), after_s=seconds)
        new = run.recoveries[before:]
        assert set(new) == found - tried and len(new) == len(set(new))
        tried = set(found)
        assert run.watch.metrics()["watchdog/over_limit"] == len(found)
