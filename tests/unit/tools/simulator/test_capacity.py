"""Deaths, joins and drains: seconds and tokens still add up, the bound still holds, and what cannot be is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seamless_verl.algorithms.samplers import SAMPLERS
from seamless_verl.errors import ConfigError
from seamless_verl.tools.simulator.__main__ import main, make_parser, scenarios
from seamless_verl.tools.simulator.capacity import CapacityChange, CapacityEvent, CapacityPlan
from seamless_verl.tools.simulator.device import SimulatedUse
from seamless_verl.tools.simulator.engine import SimulatedGroup
from seamless_verl.tools.simulator.machine import MachineProfile
from seamless_verl.tools.simulator.scenario import BOTH, ROLLOUT, TRAIN, Scenario, Scheduler
from seamless_verl.tools.simulator.simulate import Simulation, simulate
from seamless_verl.tools.simulator.workload import SimulatedTurn, SimulatedWorkload

SMALL = SimulatedWorkload(prompts=4, samples=2, median=30.0, sigma=1.0, cap=300)
DEVICES = (BOTH, BOTH, ROLLOUT, ROLLOUT, ROLLOUT)
EVENTS = (
    CapacityEvent(0.2, 0, CapacityChange.DEATH),
    CapacityEvent(0.5, 2, CapacityChange.DEATH),
    CapacityEvent(0.6, 3, CapacityChange.DRAIN),
    CapacityEvent(0.7, 4, CapacityChange.JOIN),
)


def scenario(**more: Any) -> Scenario:
    return Scenario(**{"workload": SMALL, "devices": DEVICES, "steps": 8, "warmup": 1, "seats": 4, **more})


plans = st.builds(
    CapacityPlan,
    deaths_per_hour=st.sampled_from([0.0, 600.0, 3600.0]),
    restart_s=st.floats(0, 1),
    notice_s=st.floats(0, 1),
    events=st.lists(
        st.builds(CapacityEvent, st.floats(0, 2), st.integers(0, 2), st.just(CapacityChange.DEATH)),
        max_size=4,
    ).map(lambda deaths: (*deaths, *EVENTS[2:])),
)


@given(plans, st.sampled_from(["marginal", "step_boundary"]), st.booleans(), st.booleans(), st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_seconds_and_tokens_add_up_and_the_bound_holds_whatever_dies_joins_and_leaves(
    plan: CapacityPlan, policy: str, keep_cache: bool, drop: bool, seed: int
) -> None:
    scheduler = Scheduler(policy=policy, max_staleness=1, keep_cache=keep_cache, drop=drop)
    run = Simulation(scenario(capacity=plan, scheduler=scheduler, seed=seed))
    submitted, submit = list[SimulatedGroup](), run.groups.submit
    run.groups.submit = lambda group: (submitted.append(group), submit(group))  # type: ignore[assignment,func-returns-value]
    result = run.run()
    assert all(sum(d.seconds.values()) == pytest.approx(run.cluster.now) for d in run.cluster.devices)
    assert all(min(d.seconds.values()) >= 0 for d in run.cluster.devices)
    assert result.max_staleness <= 1 and result.max_token_age <= 1
    assert run.groups.trained == 8 * SMALL.prompts
    for sample in (s for group in submitted if not group.unfinished for s in group.samples):
        assert sample.generated == pytest.approx(sample.tokens)
    for sample in (s for group in submitted for s in group.samples):
        assert sample.generated <= sample.tokens + 1e-4


@given(st.integers(0, 5), st.floats(0.05, 2.0))
@settings(max_examples=15, deadline=None)
def test_a_call_is_in_one_place_only_after_each_event(seed: int, restart_s: float) -> None:
    run = Simulation(scenario(capacity=CapacityPlan(3600, restart_s, 0.1, EVENTS), seed=seed))
    advance = run.cluster.advance

    def checked() -> None:
        advance()
        running = [sample for device in run.cluster.devices for sample in device.engine.samples]
        waiting = [entry[2] for entry in run.cluster._queue]
        assert len({*running, *waiting}) == len(running) + len(waiting)
        assert not any(device.away and device.engine.running for device in run.cluster.devices)

    run.cluster.advance = checked  # type: ignore[method-assign]
    run.run()


@given(
    plans,
    st.one_of(
        st.builds(lambda drop: {"scheduler": Scheduler(drop=drop, carry_s=0.2)}, st.booleans()),
        st.builds(
            lambda updates: {"scheduler": Scheduler(max_staleness=0, updates=updates, carry_s=0.2, tail_batching=0.5)},
            st.sampled_from([1, 4]),
        ),
        st.builds(
            lambda sampler, drop: {"sampler": sampler, "scheduler": Scheduler(drop=drop, carry_s=0.2)},
            st.sampled_from(sorted(SAMPLERS)),
            st.booleans(),
        ),
    ),
    st.integers(0, 5),
)
@settings(max_examples=40, deadline=None)
def test_tail_batching_and_samplers_hold_whatever_dies_joins_and_leaves(
    plan: CapacityPlan, more: dict[str, Any], seed: int
) -> None:
    """Every prompt is trained in time, and no engine works on a group that was dropped or deferred."""
    workload = replace(SMALL, samples=4, pass_rates=(0.0, 0.25, 0.5, 1.0))
    machine = MachineProfile(dispatch_s=0.2)
    run = Simulation(scenario(workload=workload, machine=machine, capacity=plan, seed=seed, **more))
    advance = run.cluster.advance

    def checked() -> None:
        advance()
        running = [sample for device in run.cluster.devices for sample in device.engine.samples]
        for sample in (*running, *(entry[2] for entry in run.cluster._queue)):
            assert sample.group in run.groups.generating
        assert not any(device.away and device.engine.running for device in run.cluster.devices)

    run.cluster.advance = checked  # type: ignore[method-assign]
    result = run.run()
    assert run.groups.trained == 8 * SMALL.prompts
    assert max(result.max_staleness, result.max_token_age) <= run.scenario.scheduler.max_staleness
    assert run.trainer.tail.deferred == [] and run.groups.deferred == run.trainer.tail.begun_again


def test_a_call_that_is_dropped_after_its_replica_died_is_not_begun_again() -> None:
    cluster = Simulation(scenario()).cluster
    kept, dropped = (SimulatedGroup.of(n, 1, [(SimulatedTurn(50),)]).samples[0] for n in range(2))
    for sample in (kept, dropped):
        cluster.enqueue(sample)
    cluster.place_waiting()
    for device in cluster.devices:
        cluster.cut(device)
    cluster.drop_samples({dropped})
    cluster.advance()
    assert [entry[2] for entry in cluster._queue] == [kept]


def test_a_device_whose_last_call_is_dropped_need_not_wait_to_leave() -> None:
    run = Simulation(scenario(capacity=CapacityPlan(notice_s=3600)))
    device, (sample,) = run.cluster.devices[2], SimulatedGroup.of(0, 1, [(SimulatedTurn(50),)]).samples
    device.engine.add(sample, 0, prefill_token_s=0.0)
    run.capacity._drain(device)
    assert device.leaving and not device.away
    run.cluster.drop_samples({sample})
    assert device.away


def test_a_death_takes_as_long_as_the_restart_and_its_calls_go_on_elsewhere() -> None:
    """One call of 100 tokens on one of two engines, which dies in the middle of it."""
    single = SimulatedWorkload(prompts=1, samples=1, median=100.0, sigma=0.0, prompt_tokens=0)
    machine = MachineProfile(prefill_token_s=0.0, dispatch_s=0.0, collect_s=0.0, sync_s=0.0, host_s=0.0)
    plan = CapacityPlan(restart_s=5.0, events=(CapacityEvent(50 / 475, 1, CapacityChange.DEATH),))
    scheduler = Scheduler(max_staleness=0, updates=1, carry_s=0.1)
    layout = (TRAIN, ROLLOUT, ROLLOUT)
    run = Simulation(Scenario(single, layout, scheduler, machine, steps=40, warmup=0, capacity=plan))
    run.run()
    dead, other = run.cluster.devices[1], run.cluster.devices[2]
    assert run.capacity.counts[CapacityChange.DEATH] == 1
    assert dead.seconds[SimulatedUse.AWAY] == pytest.approx(5.0)
    assert other.seconds[SimulatedUse.AWAY] == 0 < other.seconds[SimulatedUse.ROLLOUT]
    undisturbed = simulate(Scenario(single, layout, scheduler, machine, steps=40, warmup=0))
    assert run.measurements.step_ends[0] == pytest.approx(undisturbed.step_s + 0.1)


def test_a_trainers_device_goes_on_training_while_its_replica_is_dead() -> None:
    plan = CapacityPlan(restart_s=3600, events=(CapacityEvent(0.0, 0, CapacityChange.DEATH),))
    run = Simulation(scenario(devices=(BOTH, ROLLOUT), capacity=plan))
    run.run()
    assert run.cluster.devices[0].seconds[SimulatedUse.ROLLOUT] == 0
    assert run.cluster.devices[0].seconds[SimulatedUse.TRAIN] > 0


def test_a_drained_device_finishes_its_calls_and_a_joined_one_generates() -> None:
    run = Simulation(scenario(capacity=CapacityPlan(notice_s=3600, events=EVENTS[2:])))
    cuts = list[str]()
    cut = run.cluster.cut
    run.cluster.cut = lambda device: (cuts.append(f"{device.name}:{device.engine.running}"), cut(device))  # type: ignore[assignment,func-returns-value]
    run.run()
    leaving, joining = run.cluster.devices[3], run.cluster.devices[4]
    assert "d3:0" in cuts
    assert leaving.seconds[SimulatedUse.AWAY] > 0 < leaving.seconds[SimulatedUse.ROLLOUT]
    assert joining.seconds[SimulatedUse.AWAY] == pytest.approx(0.7 + run.scenario.machine.sync_s)
    assert joining.seconds[SimulatedUse.ROLLOUT] > 0


@pytest.mark.parametrize("policy", ["marginal", "step_boundary"])
def test_the_trainers_devices_generate_when_the_only_other_replica_is_dead(policy: str) -> None:
    """The run ends long before that replica is back, and the share of a device that is away is no idle time."""
    plan = CapacityPlan(restart_s=3600, events=(CapacityEvent(0.0, 1, CapacityChange.DEATH),))
    result = simulate(scenario(devices=(BOTH, ROLLOUT), capacity=plan, scheduler=Scheduler(policy=policy)))
    assert result.shares["d0"][SimulatedUse.ROLLOUT] > 0.3
    assert result.shares["d1"][SimulatedUse.AWAY] == pytest.approx(1)
    assert result.away_share == pytest.approx(0.5)


def test_many_deaths_cost_throughput_and_few_do_not() -> None:
    even = scenario(steps=40, workload=replace(SMALL, prompts=16))
    undisturbed, few, many = (
        simulate(replace(even, capacity=CapacityPlan(rate, restart_s=5.0))).tokens_per_s for rate in (0, 60, 3600)
    )
    assert many < 0.8 * undisturbed
    assert few == pytest.approx(undisturbed, rel=0.1)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"deaths_per_hour": -1}, "deaths_per_hour=-1"),
        ({"deaths_per_hour": float("nan")}, "deaths_per_hour=nan"),
        ({"restart_s": float("inf")}, "restart_s=inf"),
        ({"notice_s": -0.5}, "notice_s=-0.5"),
        ({"events": (CapacityEvent(-1.0, 2, CapacityChange.DEATH),)}, "--death='-1:2'"),
        ({"events": (CapacityEvent(1.0, 9, CapacityChange.DEATH),)}, "--death='1:9'"),
        ({"events": (CapacityEvent(1.0, 0, CapacityChange.DRAIN),)}, "--drain='1:0'"),
        ({"events": (CapacityEvent(1.0, 5, CapacityChange.DEATH),)}, "--death='1:5'"),
        ({"events": EVENTS[3:] * 2}, "device 4 has two of these"),
        ({"events": (*EVENTS[3:], CapacityEvent(0.1, 4, CapacityChange.DEATH))}, "--death='0.1:4'"),
    ],
)
def test_what_cannot_be_is_refused_by_name(plan: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        scenario(devices=(*DEVICES, TRAIN), capacity=CapacityPlan(**plan))


def test_the_command_takes_the_changes_of_single_devices(capsys: pytest.CaptureFixture[str]) -> None:
    devices = ["--devices", "2*train+rollout", "3*rollout", "--notice-s", "5"]
    changes = ["--death", "0.2:0", "0.5:2", "--join", "0.7:4", "--drain", "0.6:3"]
    (made,) = scenarios(make_parser().parse_args([*devices, *changes])).values()
    assert (set(made.capacity.events), made.capacity.notice_s) == (set(EVENTS), 5.0)
    few = ["--workload", "w1", "--updates", "1", "--steps", "8", "--json", *devices]
    assert main(few) == main([*few, "--drain", "0:3", "0:4"]) == 0
    whole, drained = (json.loads(text) for text in capsys.readouterr().out.replace("}\n{", "}\0{").split("\0"))
    assert not whole["seamless"]["shares"]["d3"]["away"]
    assert drained["seamless"]["shares"]["d3"]["away"] == drained["seamless"]["shares"]["d4"]["away"] == 1
    with pytest.raises(SystemExit):
        main(["--drain", "3"])
    assert "argument --drain: invalid SECONDS:DEVICE value: '3'" in capsys.readouterr().err


def test_a_plan_that_could_leave_no_engine_is_refused() -> None:
    with pytest.raises(ConfigError, match=re.escape("--join, --drain=[1]")):
        scenario(devices=(TRAIN, ROLLOUT), capacity=CapacityPlan(events=(CapacityEvent(1.0, 1, CapacityChange.DRAIN),)))


def test_a_thousand_devices_of_which_some_die_are_simulated_in_seconds() -> None:
    workload = SimulatedWorkload(prompts=256, samples=8, median=200.0, sigma=0.8, cap=1024)
    plan = CapacityPlan(deaths_per_hour=3600.0, restart_s=2.0)
    devices = (*(BOTH,) * 512, *(ROLLOUT,) * 512)
    run = Simulation(Scenario(workload, devices, Scheduler(look_s=0.2), steps=3, warmup=1, capacity=plan))
    result = run.run()
    assert run.capacity.counts[CapacityChange.DEATH] > 0
    assert result.max_staleness <= 1 and result.away_share > 0
