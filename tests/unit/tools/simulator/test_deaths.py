"""Deaths of replicas: seconds and tokens still add up, the bound still holds, and what cannot be is refused."""

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
from seamless_verl.tools.simulator.engine import SimulatedGroup, SimulatedUse
from seamless_verl.tools.simulator.machine import MachineProfile
from seamless_verl.tools.simulator.scenario import BOTH, ROLLOUT, TRAIN, Deaths, Scenario, Scheduler, SimulatedWorkload
from seamless_verl.tools.simulator.simulate import Simulation, simulate

SMALL = SimulatedWorkload(prompts=4, samples=2, median=30.0, sigma=1.0, cap=300)
DEVICES = (BOTH, BOTH, ROLLOUT, ROLLOUT, ROLLOUT)
DEATHS = ((0.2, 0), (0.5, 2))


def scenario(**more: Any) -> Scenario:
    return Scenario(**{"workload": SMALL, "devices": DEVICES, "steps": 8, "warmup": 1, "seats": 4, **more})


deaths = st.builds(
    Deaths,
    per_hour=st.sampled_from([0.0, 600.0, 3600.0]),
    restart_s=st.floats(0, 1),
    at=st.lists(st.tuples(st.floats(0, 2), st.integers(0, 4)), max_size=4).map(tuple),
)


@given(deaths, st.sampled_from(["marginal", "step_boundary"]), st.booleans(), st.booleans(), st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_seconds_and_tokens_add_up_and_the_bound_holds_whatever_dies(
    plan: Deaths, policy: str, keep_cache: bool, drop: bool, seed: int
) -> None:
    scheduler = Scheduler(policy=policy, max_staleness=1, keep_cache=keep_cache, drop=drop)
    run = Simulation(scenario(deaths=plan, scheduler=scheduler, seed=seed))
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
    run = Simulation(scenario(deaths=Deaths(3600, restart_s, DEATHS), seed=seed))
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
    deaths,
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
def test_tail_batching_and_samplers_hold_whatever_dies(plan: Deaths, more: dict[str, Any], seed: int) -> None:
    """Every prompt is trained in time, and no engine works on a group that was dropped or deferred."""
    workload = replace(SMALL, samples=4, pass_rates=(0.0, 0.25, 0.5, 1.0))
    machine = MachineProfile(dispatch_s=0.2)
    run = Simulation(scenario(workload=workload, machine=machine, deaths=plan, seed=seed, **more))
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


def test_a_death_takes_as_long_as_the_restart_and_its_calls_go_on_elsewhere() -> None:
    """One call of 100 tokens on one of two engines, which dies in the middle of it."""
    single = SimulatedWorkload(prompts=1, samples=1, median=100.0, sigma=0.0, prompt_tokens=0)
    machine = MachineProfile(prefill_token_s=0.0, dispatch_s=0.0, collect_s=0.0, sync_s=0.0, host_s=0.0)
    plan = Deaths(restart_s=5.0, at=((50 / 475, 1),))
    scheduler = Scheduler(max_staleness=0, updates=1, carry_s=0.1)
    layout = (TRAIN, ROLLOUT, ROLLOUT)
    run = Simulation(Scenario(single, layout, scheduler, machine, steps=40, warmup=0, deaths=plan))
    run.run()
    dead, other = run.cluster.devices[1], run.cluster.devices[2]
    assert run.deaths.count == 1
    assert dead.seconds[SimulatedUse.AWAY] == pytest.approx(5.0)
    assert other.seconds[SimulatedUse.AWAY] == 0 < other.seconds[SimulatedUse.ROLLOUT]
    undisturbed = simulate(Scenario(single, layout, scheduler, machine, steps=40, warmup=0))
    assert run.measurements.step_ends[0] == pytest.approx(undisturbed.step_s + 0.1)


def test_a_trainers_device_goes_on_training_while_its_replica_is_dead() -> None:
    plan = Deaths(restart_s=3600, at=((0.0, 0),))
    run = Simulation(scenario(devices=(BOTH, ROLLOUT), deaths=plan))
    run.run()
    assert run.cluster.devices[0].seconds[SimulatedUse.ROLLOUT] == 0
    assert run.cluster.devices[0].seconds[SimulatedUse.TRAIN] > 0


@pytest.mark.parametrize("policy", ["marginal", "step_boundary"])
def test_the_trainers_devices_generate_when_the_only_other_replica_is_dead(policy: str) -> None:
    """The run ends long before that replica is back, and the share of a device that is away is no idle time."""
    plan = Deaths(restart_s=3600, at=((0.0, 1),))
    result = simulate(scenario(devices=(BOTH, ROLLOUT), deaths=plan, scheduler=Scheduler(policy=policy)))
    assert result.shares["d0"][SimulatedUse.ROLLOUT] > 0.3
    assert result.shares["d1"][SimulatedUse.AWAY] == pytest.approx(1)
    assert result.away_share == pytest.approx(0.5)


def test_many_deaths_cost_throughput_and_few_do_not() -> None:
    even = scenario(steps=40, workload=replace(SMALL, prompts=16))
    undisturbed, few, many = (
        simulate(replace(even, deaths=Deaths(rate, restart_s=5.0))).tokens_per_s for rate in (0, 60, 3600)
    )
    assert many < 0.8 * undisturbed
    assert few == pytest.approx(undisturbed, rel=0.1)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"per_hour": -1}, "deaths_per_hour=-1"),
        ({"per_hour": float("nan")}, "deaths_per_hour=nan"),
        ({"restart_s": float("inf")}, "restart_s=inf"),
        ({"at": ((-1.0, 2),)}, "--death='-1:2'"),
        ({"at": ((1.0, 9),)}, "--death='1:9'"),
        ({"at": ((1.0, 5),)}, "--death='1:5'"),
    ],
)
def test_what_cannot_be_is_refused_by_name(plan: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        scenario(devices=(*DEVICES, TRAIN), deaths=Deaths(**plan))


def test_the_command_takes_the_deaths_of_single_devices(capsys: pytest.CaptureFixture[str]) -> None:
    devices = ["--devices", "2*train+rollout", "3*rollout", "--restart-s", "3600"]
    (made,) = scenarios(make_parser().parse_args([*devices, "--death", "0.2:0", "0.5:2"])).values()
    assert (made.deaths.at, made.deaths.restart_s) == (DEATHS, 3600)
    few = ["--workload", "w1", "--updates", "1", "--steps", "8", "--json", *devices]
    assert main(few) == main([*few, "--death", "0:3", "0:4"]) == 0
    whole, dead = (json.loads(text) for text in capsys.readouterr().out.replace("}\n{", "}\0{").split("\0"))
    assert not whole["seamless"]["shares"]["d3"]["away"]
    assert dead["seamless"]["shares"]["d3"]["away"] == dead["seamless"]["shares"]["d4"]["away"] == 1
    with pytest.raises(SystemExit):
        main(["--death", "3"])
    assert "argument --death: invalid SECONDS:DEVICE value: '3'" in capsys.readouterr().err


def test_a_thousand_devices_of_which_some_die_are_simulated_in_seconds() -> None:
    workload = SimulatedWorkload(prompts=256, samples=8, median=200.0, sigma=0.8, cap=1024)
    plan = Deaths(per_hour=3600.0, restart_s=2.0)
    devices = (*(BOTH,) * 512, *(ROLLOUT,) * 512)
    run = Simulation(Scenario(workload, devices, Scheduler(look_s=0.2), steps=3, warmup=1, deaths=plan))
    result = run.run()
    assert run.deaths.count > 0
    assert result.max_staleness <= 1 and result.away_share > 0
