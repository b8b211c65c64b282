"""What each lending policy decides, and that a restored policy decides as if it had never stopped."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.lending import COSTS, observe_group_interval, uses, view

from seamless_verl.errors import ConfigError
from seamless_verl.resources.lending import POLICIES, lending_policy
from seamless_verl.resources.lending.marginal import Marginal
from seamless_verl.resources.lending.policy import (
    Costs,
    LendingPolicy,
    LendingReason,
    LendingView,
    Never,
    StepBoundary,
    Use,
)

EXPENSIVE = Costs(switch_to_rollout_s=20.0, switch_to_train_s=20.0, train_s=0.4)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_devices_of_one_tag_have_no_choice(name: str) -> None:
    decision = lending_policy(name).decide(view("TR"))
    assert [(assignment.use, assignment.reason) for assignment in decision.values()] == [
        (Use.TRAIN, LendingReason.TAGS),
        (Use.ROLLOUT, LendingReason.TAGS),
    ]


def test_never_lends_until_the_first_handover_and_not_after_it() -> None:
    policy = Never()
    assert uses(policy, view("BBR", lent=True)) == "RRR"
    assert uses(policy, view("BBR", lent=True, due_in_s=0.5)) == "TTR"
    assert uses(policy, view("BBR")) == "TTR"
    resumed = Never()
    assert uses(resumed, view("BR", trained=3)) == "TR"


def test_never_is_refused_where_nobody_would_generate() -> None:
    with pytest.raises(ConfigError, match="lending='never'"):
        Never().decide(view("BB"))


def test_step_boundary_waits_for_its_share_and_lends_inside_no_step() -> None:
    policy = StepBoundary(share=0.5)
    assert uses(policy, view("BR", lent=True, ready=7)) == "RR"
    assert uses(policy, view("BR", lent=True, ready=8)) == "TR"
    assert uses(policy, view("BR", lent=True, ready=8, held=True)) == "RR"
    assert uses(policy, view("BR", ready=0, update=1)) == "TR"
    assert uses(policy, view("BB", ready=0, update=1)) == "RR"
    assert policy.metrics() == {"lending/lent/needed": 2.0, "lending/reclaimed/due": 1.0}
    with pytest.raises(ConfigError, match="share=0"):
        StepBoundary(share=0)


def test_marginal_lends_for_a_gain_and_not_for_less_than_its_cost() -> None:
    policy = Marginal()
    now = observe_group_interval(policy, 0.5)
    assert uses(policy, view("BR", now=now, trained=1, finished=59)) == "RR"
    assert uses(policy, view("BR", now=now, trained=1, finished=59, costs=EXPENSIVE)) == "TR"
    quick = Marginal()
    now = observe_group_interval(quick, 0.002)
    decision = quick.decide(view("BR", now=now, trained=1, finished=59))
    assert decision["B0"].reason is LendingReason.COST


@pytest.mark.parametrize(("seconds_per_group", "reason"), [(0.006, LendingReason.COST), (0.007, LendingReason.GAIN)])
def test_marginal_wants_half_as_much_again_as_the_cost(seconds_per_group: float, reason: LendingReason) -> None:
    """Four groups are missing, 0.01 s go into the switch there, and 0.015 s must remain for one of 0.01 s back."""
    policy = Marginal()
    now = observe_group_interval(policy, seconds_per_group)
    assert policy.decide(view("BR", now=now, trained=1, finished=59))["B0"].reason is reason


def test_the_dwell_time_does_not_keep_training_waiting_for_groups() -> None:
    policy = Marginal()
    now = observe_group_interval(policy, 0.5)
    assert uses(policy, view("BB", now=now, trained=1, finished=59)) == "RR"
    assert uses(policy, view("BB", now=now + 0.001, lent=True, running=1, ready=4, due_in_s=0.0)) == "TT"
    assert uses(policy, view("BB", now=now + 0.002, trained=2, finished=59)) == "RR"


def test_marginal_lends_nothing_when_no_call_waits_and_none_will_come() -> None:
    policy = Marginal()
    now = observe_group_interval(policy, 0.5)
    shown = view("BR", now=now, trained=1, finished=59, waiting=0)
    assert policy.decide(shown)["B0"].reason is LendingReason.EMPTY
    coming = replace(shown, demand=replace(shown.demand, coming=32))
    assert uses(policy, coming) == "RR"


def test_marginal_lends_only_as_many_as_have_calls() -> None:
    policy = Marginal()
    now = observe_group_interval(policy, 0.5, "BBBR")
    assert uses(policy, view("BBBR", now=now, trained=1, finished=59, waiting=2)) == "RRTR"


def test_marginal_uses_the_hosts_time_when_it_is_longer_than_the_switches() -> None:
    policy = Marginal()
    assert uses(policy, view("BB", due_in_s=0.2, ready=4)) == "RR"
    assert uses(policy, view("BB", due_in_s=0.02, ready=4)) == "TT"


def test_marginal_reclaims_when_due_and_just_in_time_before() -> None:
    policy = Marginal()
    assert uses(policy, view("BBR", lent=True, running=8, ready=4, due_in_s=0.5)) == "RRR"
    assert uses(policy, view("BBR", lent=True, running=8, ready=4, due_in_s=0.01)) == "TTR"


def test_marginal_collects_mini_batches_where_a_switch_is_expensive_and_engines_are_full() -> None:
    expensive = replace(COSTS, switch_to_rollout_s=0.3, switch_to_train_s=0.3)
    policy = Marginal()
    observe_group_interval(policy, 0.05)
    full = view("BB", now=9.0, lent=True, running=32, ready=4, due_in_s=0.0, costs=expensive)
    assert policy.decide(full)["B0"].reason is LendingReason.AMORTIZE
    observe_group_interval(policy := Marginal(), 0.5)
    with_a_dead_one = replace(full, devices=(full.devices[0], replace(full.devices[1], slots=0, running=0)))
    assert policy.decide(with_a_dead_one)["B0"].reason is LendingReason.AMORTIZE, "the one that lives is full"
    assert uses(policy, replace(full, demand=replace(full.demand, ready=16))) == "TT"
    assert uses(policy, replace(full, costs=COSTS)) == "TT"


def test_some_device_always_generates_when_training_waits() -> None:
    expensive = view("BB", trained=1, costs=EXPENSIVE)
    assert Marginal().decide(expensive)["B0"].reason in (LendingReason.GAIN, LendingReason.NEEDED)
    policy = Marginal()
    now = observe_group_interval(policy, 0.5)
    assert LendingReason.NEEDED in {
        assignment.reason for assignment in policy.decide(replace(expensive, now=now)).values()
    }


@pytest.mark.parametrize("policy", [Marginal(), StepBoundary()])
def test_a_dead_replica_is_not_taken_for_one_that_will_generate(policy: LendingPolicy) -> None:
    now = observe_group_interval(policy, 0.5)  # what it would gain is less than a switch costs
    alive = view("BR", now=now, trained=1, update=1, finished=59, costs=EXPENSIVE)
    shared, fixed = alive.devices
    dead = replace(alive, devices=(shared, replace(fixed, running=0, rate=0.0, slots=0)))
    assert policy.decide(alive)["B0"].use is Use.TRAIN
    assert policy.decide(dead)["B0"].reason is LendingReason.NEEDED


def test_frozen_calls_that_the_bound_waits_for_bring_their_device_back() -> None:
    policy = Marginal()
    now = observe_group_interval(policy, 0.001)
    shown = view("BR", now=now, trained=1, finished=59, held=True, ready=4, waiting=0, running=1)
    urgent = replace(shown.devices[0], urgent=1, rate=0.0)
    assignment = policy.decide(replace(shown, devices=(urgent, shown.devices[1])))["B0"]
    assert (assignment.use, assignment.reason) == (Use.ROLLOUT, LendingReason.NEEDED)


@pytest.mark.parametrize("policy", [Never(), StepBoundary(), Marginal()])
def test_no_policy_leaves_calls_frozen_that_training_waits_for(policy: LendingPolicy) -> None:
    """They froze while no other device had a replica, and one has by now."""
    shown = view("BR", trained=1, update=1, held=True, ready=8, running=1)
    urgent = replace(shown.devices[0], urgent=1)
    frozen = replace(shown, devices=(urgent, shown.devices[1]))
    assert policy.decide(frozen)["B0"].reason is LendingReason.NEEDED
    assert policy.decide(replace(frozen, due_in_s=0.0))["B0"].use is Use.TRAIN


def test_calls_move_where_another_device_generates_and_freeze_where_none_does() -> None:
    carried_calls = Marginal().decide(view("BR", lent=True, running=8, due_in_s=0.0))["B0"]
    frozen = Marginal().decide(view("BB", lent=True, running=8, due_in_s=0.0))["B0"]
    assert (carried_calls.use, carried_calls.carry) == (Use.TRAIN, True)
    assert (frozen.use, frozen.carry) == (Use.TRAIN, False)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"lending='always'.*marginal.*never.*step_boundary"):
        lending_policy("always")


steps = st.lists(
    st.tuples(
        st.floats(0.001, 0.3),  # seconds between views
        st.integers(0, 20),  # ready
        st.integers(0, 40),  # waiting
        st.integers(0, 3),  # groups finished in between
        st.one_of(st.none(), st.floats(0, 0.5)),  # due in
        st.integers(0, 32),  # running
    ),
    min_size=1,
    max_size=60,
)


def follow(policy: LendingPolicy, script: list[tuple[float, int, int, int, float | None, int]]) -> list[LendingView]:
    """Views in which devices do what was decided."""
    views, now, finished, in_use = [], 0.0, 0, [Use.TRAIN, Use.TRAIN]
    for seconds, ready, waiting, more, due, running in script:
        now, finished = now + seconds, finished + more
        made = view("BBR", now=now, ready=ready, waiting=waiting, finished=finished, due_in_s=due, trained=1)
        own = [replace(d, use=use, running=running) for d, use in zip(made.devices, in_use, strict=False)]
        views.append(replace(made, devices=(*own, made.devices[2])))
        decision = policy.decide(views[-1])
        in_use = [decision[device.device_id].use for device in own]
    return views


@pytest.mark.parametrize("fresh", [Never, StepBoundary, Marginal])
@given(script=steps, data=st.data())
@settings(max_examples=60, deadline=None)
def test_restoring_equals_never_having_stopped(
    fresh: Callable[[], LendingPolicy],
    script: list[tuple[float, int, int, int, float | None, int]],
    data: st.DataObject,
) -> None:
    views = follow(fresh(), script)
    cut = data.draw(st.integers(0, len(views)))
    uninterrupted, before, after = fresh(), fresh(), fresh()
    whole = [uninterrupted.decide(each) for each in views]
    for each in views[:cut]:
        before.decide(each)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert [after.decide(each) for each in views[cut:]] == whole[cut:]
    assert after.metrics() == uninterrupted.metrics()
    assert after.state_dict() == uninterrupted.state_dict()


def test_the_state_of_another_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="Marginal"):
        Never().load_state_dict(Marginal().state_dict())


@given(
    noise=st.lists(
        st.tuples(
            st.floats(0.0005, 0.02), st.floats(0.2, 5.0), st.integers(0, 3), st.integers(0, 2), st.integers(0, 1)
        ),
        min_size=20,
        max_size=100,
    )
)
@settings(max_examples=50, deadline=None)
def test_noise_moves_a_device_no_more_often_than_the_dwell_time_allows(
    noise: list[tuple[float, float, int, int, int]],
) -> None:
    """Costs, demand, load and pace all jump about; nothing is ever due."""
    policy, dwell = Marginal(), 2.0
    now, finished, use, changes, shortest = 0.0, 0, Use.TRAIN, list[float](), COSTS
    for seconds, factor, waiting, more, running in noise:
        now, finished = now + seconds, finished + more
        made = view("BR", now=now, waiting=waiting, finished=finished, trained=1, ready=3)
        costs = replace(COSTS, switch_to_rollout_s=0.01 * max(1.0, factor), switch_to_train_s=0.01)
        with_trainer = replace(made.devices[0], use=use, running=running)
        assignment = policy.decide(replace(made, devices=(with_trainer, made.devices[1]), costs=costs))["B0"]
        if assignment.use is not use:
            changes.append(now)
        use = assignment.use
    least = dwell * (shortest.switch_to_rollout_s + shortest.switch_to_train_s)
    assert all(late - early >= least - 1e-9 for early, late in pairwise(changes))
    assert len(changes) <= 1 + now / least


@given(script=steps)
@settings(max_examples=60, deadline=None)
def test_where_switching_never_pays_marginal_decides_as_never_does(
    script: list[tuple[float, int, int, int, float | None, int]],
) -> None:
    never, marginal = Never(), Marginal()
    observe_group_interval(marginal, 0.05)
    for at_view in follow(Never(), script):
        later = replace(
            at_view,
            now=at_view.now + 10,
            costs=EXPENSIVE,
            demand=replace(at_view.demand, finished=at_view.demand.finished + 60),
        )
        assert uses(marginal, later) == uses(never, later)


@given(st.permutations("BBTR"), steps)
@settings(max_examples=40, deadline=None)
def test_every_device_is_decided_and_train_devices_are_all_there_when_due(
    letters: list[str], script: list[tuple[float, int, int, int, float | None, int]]
) -> None:
    policy = Marginal()
    for seconds, ready, waiting, _, _, running in script:
        shown = view("".join(letters), now=seconds, ready=ready, waiting=waiting, running=running, due_in_s=0.0)
        decision = policy.decide(shown)
        assert set(decision) == {device.device_id for device in shown.devices}
        assert all(decision[d.device_id].use is Use.TRAIN for d in shown.devices if "train" in d.tags)
