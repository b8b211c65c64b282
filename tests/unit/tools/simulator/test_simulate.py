"""The simulator: seconds and groups add up, the bound holds, a seed decides everything, and known cases come out."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seamless_verl.resources.lending.marginal import Marginal
from seamless_verl.resources.lending.policy import Decision, LendingView
from seamless_verl.tools.compare.workloads import WORKLOADS as BENCH_WORKLOADS
from seamless_verl.tools.simulator.__main__ import main
from seamless_verl.tools.simulator.engine import SimulatedEngine, SimulatedGroup, SimulatedUse
from seamless_verl.tools.simulator.machine import ONE_CORE, MachineProfile
from seamless_verl.tools.simulator.report import MEASURED, MeasuredRun, simulate_run
from seamless_verl.tools.simulator.scenario import (
    BOTH,
    ROLLOUT,
    SCHEDULERS,
    TRAIN,
    WORKLOADS,
    Scenario,
    Scheduler,
    SimulatedTurn,
    SimulatedWorkload,
)
from seamless_verl.tools.simulator.simulate import Simulation, simulate

SMALL = SimulatedWorkload(prompts=4, samples=2, median=30.0, sigma=1.0, cap=300)
LAYOUTS = ((BOTH, BOTH), (BOTH, ROLLOUT), (TRAIN, ROLLOUT), (BOTH, BOTH, ROLLOUT))


def scenario(**more: Any) -> Scenario:
    return Scenario(**{"workload": SMALL, "steps": 8, "warmup": 1, "seats": 4, **more})


schedulers = st.builds(
    Scheduler,
    policy=st.sampled_from(["marginal", "step_boundary"]),
    max_staleness=st.sampled_from([0, 1, 4]),
    updates=st.sampled_from([1, 2, 4]),
    oldest_first=st.booleans(),
    carry=st.booleans(),
    cut_at_sync=st.booleans(),
    early_pause=st.booleans(),
)
machines = st.builds(
    MachineProfile,
    switch_to_rollout_s=st.floats(0.001, 0.3),
    switch_to_train_s=st.floats(0.001, 0.3),
    host_s=st.floats(0, 0.2),
    host_token_s=st.sampled_from([0.0, 2e-4]),
)


@given(st.sampled_from(LAYOUTS), schedulers, machines, st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_seconds_and_tokens_add_up_and_the_bound_is_never_passed(
    devices: tuple[frozenset[str], ...], scheduler: Scheduler, machine: MachineProfile, seed: int
) -> None:
    """Every token is generated once, and counted under a version."""
    run = Simulation(scenario(devices=devices, scheduler=scheduler, machine=machine, seed=seed))
    submitted, submit = list[SimulatedGroup](), run.groups.submit
    run.groups.submit = lambda group: (submitted.append(group), submit(group))  # type: ignore[assignment,func-returns-value]
    result = run.run()
    done = [sample for group in submitted if not group.unfinished for sample in group.samples]
    assert len(done) >= 8 * SMALL.prompts * SMALL.samples
    for sample in done:
        assert sample.generated == pytest.approx(sample.tokens)
        assert 0 <= sample.version_tokens <= 8 * sample.tokens
    assert -1e-9 <= result.mean_token_age <= result.max_token_age + 1e-9
    for shares in result.shares.values():
        assert sum(shares.values()) == pytest.approx(1)
        assert min(shares.values()) >= 0
    assert all(sum(d.seconds.values()) == pytest.approx(run.cluster.now) for d in run.cluster.devices)
    assert result.max_staleness <= scheduler.max_staleness
    assert result.max_token_age <= scheduler.max_staleness
    assert run.groups.trained == 8 * SMALL.prompts
    assert result.bound_step_s <= result.step_s


@given(
    st.sampled_from(LAYOUTS), st.sampled_from([0.1, 0.3, 1.0]), st.sampled_from([1, 2, 4]), machines, st.integers(0, 5)
)
@settings(max_examples=40, deadline=None)
def test_with_tail_batching_every_prompt_is_trained_once_on_the_step_s_own_weights(
    devices: tuple[frozenset[str], ...], share: float, updates: int, machine: MachineProfile, seed: int
) -> None:
    scheduler = Scheduler(max_staleness=0, updates=updates, tail_batching=share)
    run = Simulation(scenario(devices=devices, scheduler=scheduler, machine=machine, seed=seed))
    trained, record = list[int](), run.measurements.record_trained
    run.measurements.record_trained = (  # type: ignore[method-assign]
        lambda group, step: (trained.append(group.number), record(group, step))[1]
    )
    result = run.run()
    assert sorted(trained) == list(range(8 * SMALL.prompts)) and run.trainer.tail.deferred == []
    assert (result.max_staleness, result.max_token_age, result.mean_token_age) == (0, 0, pytest.approx(0, abs=1e-9))
    assert run.groups.deferred == run.trainer.tail.begun_again > 0 < result.dropped_share


def test_tail_batching_is_faster_where_lengths_have_a_tail_and_gains_nothing_where_they_have_none() -> None:
    """Of 16 prompts with W2's lengths 3 more; docs/layouts.md has the table."""
    plain = Scenario(WORKLOADS["w2"], (BOTH, BOTH), Scheduler(max_staleness=0, updates=1), seats=64, steps=60)
    batched = replace(plain, scheduler=replace(plain.scheduler, tail_batching=0.1875))
    assert simulate(batched).tokens_per_s > 1.15 * simulate(plain).tokens_per_s
    even, even_batched = (replace(run, workload=WORKLOADS["w1"], steps=20) for run in (plain, batched))
    assert simulate(even_batched).tokens_per_s < 1.02 * simulate(even).tokens_per_s


def test_where_the_bound_is_not_enforced_it_is_passed() -> None:
    skewed = replace(SMALL, sigma=2.0, cap=3000)
    free, held = (
        simulate(scenario(workload=skewed, steps=30, scheduler=Scheduler(max_staleness=1, enforce_bound=enforce_bound)))
        for enforce_bound in (False, True)
    )
    assert free.max_staleness > 1 >= held.max_staleness


def test_the_same_seed_gives_the_same_run_and_another_one_another() -> None:
    first, again, other = (simulate(scenario(seed=seed)) for seed in (3, 3, 4))
    assert first == again != other


def test_every_scheduler_sees_the_same_prompts() -> None:
    drawn = WORKLOADS["w2"].group(1, 7)
    assert drawn == WORKLOADS["w2"].group(1, 7) != WORKLOADS["w2"].group(1, 8)
    lengths = [turn.tokens for n in range(400) for (turn,) in WORKLOADS["w2"].group(1, n)]
    assert sorted(lengths)[len(lengths) // 2] == pytest.approx(50, rel=0.1)
    assert max(lengths) == 1792
    tools = [turns[0].tool_s for n in range(400) for turns in WORKLOADS["w3"].group(1, n)]
    assert sum(tools) / len(tools) == pytest.approx(WORKLOADS["w3"].tool_mean_s, rel=0.1)


def test_a_policy_restored_in_the_middle_of_a_run_changes_nothing() -> None:
    class Restored:
        """A policy that is thrown away and restored from its state at every decision."""

        def __init__(self) -> None:
            self.policy = Marginal()

        def decide(self, view: LendingView) -> Decision:
            state = json.loads(json.dumps(self.policy.state_dict()))
            self.policy = Marginal()
            self.policy.load_state_dict(state)
            return self.policy.decide(view)

        def metrics(self) -> dict[str, float]:
            return self.policy.metrics()

        def state_dict(self) -> dict[str, Any]:
            return self.policy.state_dict()

        def load_state_dict(self, state: Any) -> None:
            self.policy.load_state_dict(state)

    made = scenario(devices=(BOTH, BOTH, ROLLOUT))
    assert Simulation(made, policy=Restored()).run() == simulate(made)


def test_one_call_after_another_takes_what_the_curve_says() -> None:
    """One prompt of one sample of 100 tokens, trained on another device: every second is accounted for."""
    single = SimulatedWorkload(prompts=1, samples=1, median=100.0, sigma=0.0, prompt_tokens=0)
    machine = MachineProfile(train_token_s=0.001, sync_s=0.5, host_s=0.25, dispatch_s=0.1, collect_s=0.05)
    result = simulate(
        Scenario(single, (TRAIN, ROLLOUT), Scheduler(max_staleness=0, updates=1), machine, steps=3, warmup=1)
    )
    assert result.step_s == pytest.approx(0.1 + 100 / 475 + 0.05 + 0.25 + 0.1 + 0.5)
    assert result.shares["d1"][SimulatedUse.ROLLOUT] * result.step_s == pytest.approx(100 / 475)
    assert result.shares["d0"][SimulatedUse.TRAIN] * result.step_s == pytest.approx(0.1)
    assert result.bound_step_s == pytest.approx((0.1 + 100 / machine.rate(32)) / 2)


def test_the_rate_curve_goes_through_what_was_measured_and_rises_between() -> None:
    rates = [MachineProfile().rate(calls) for calls in range(1, 129)]
    assert [rates[calls - 1] for calls in ONE_CORE] == pytest.approx(list(ONE_CORE.values()))
    assert rates == sorted(rates)


def test_an_engine_runs_calls_side_by_side_and_a_cut_call_continues() -> None:
    engine = SimulatedEngine(seats=2, prefill_token_s=0.01)
    short, long = SimulatedGroup(0, 1).add([(SimulatedTurn(10),), (SimulatedTurn(30),)])
    for sample in (short, long):
        engine.add(sample)
    engine.advance(engine.steps_to_next_end())
    assert engine.ended() == [short] and engine.longest == 20
    engine.advance(5)
    assert engine.cut() == [long] and (long.remaining, long.context) == (15, 15)
    engine.add(long)
    assert (engine.stalled_s, engine.steps_to_next_end()) == (pytest.approx(0.15), 15)


def test_tokens_belong_to_the_weights_they_were_generated_with() -> None:
    cluster = Simulation(scenario()).cluster
    engine, (sample,) = cluster.devices[0].engine, SimulatedGroup(0, 1).add([(SimulatedTurn(10),)])
    engine.add(sample)
    engine.advance(4)
    cluster.commit(1)
    engine.advance(6)
    assert engine.ended() == [sample]
    assert (sample.first_version, sample.generated, sample.version_tokens) == (0, 10, 6)


def test_multiplexing_leaves_less_idle_than_disjoint_devices_and_than_waiting_for_whole_batches() -> None:
    even = Scenario(WORKLOADS["w1"], (BOTH, BOTH), Scheduler(max_staleness=1), steps=10)
    multiplexed, disjoint = simulate(even), simulate(replace(even, devices=(TRAIN, ROLLOUT)))
    assert multiplexed.tokens_per_s > 1.3 * disjoint.tokens_per_s
    assert multiplexed.idle_share < 0.05 < 0.25 < disjoint.idle_share
    uneven = replace(even, workload=WORKLOADS["w2"], scheduler=Scheduler(max_staleness=4, ahead=1))
    synchronous = replace(uneven, scheduler=SCHEDULERS["sync"])
    assert simulate(uneven).tokens_per_s > 1.4 * simulate(synchronous).tokens_per_s


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row.name}-{row.tokens_per_s}")
def test_runs_come_out_near_what_was_measured(row: MeasuredRun) -> None:
    """verl's modes on the bench's w1 and w2 within a tenth, the rest within a fifth: see `--calibration`."""
    near = row.bench and row.workload in ("w1", "w2") and row.mode != "seamless"
    assert simulate_run(row) == pytest.approx(row.tokens_per_s, rel=0.1 if near else 0.2)


@pytest.mark.parametrize("name", ["w1", "w2", "w3"])
def test_a_workload_of_the_bench_is_drawn_as_there(name: str) -> None:
    drawn, bench = replace(WORKLOADS[name], bench=name), BENCH_WORKLOADS[name]
    bench = bench.with_turn(drawn.tool_mean_s)
    for number in range(20):
        for sample, turns in enumerate(drawn.group(1, number)):
            forced = bench.sample(number, sample)
            assert [turn.tokens for turn in turns] == [turn.tokens for turn in forced]
            assert [turn.tool_s for turn in turns] == pytest.approx([turn.wait_s for turn in forced])
            assert [turn.tool_tokens for turn in turns] == [turn.tool_tokens for turn in forced]


def test_the_command_prints_a_table_json_and_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--steps", "5", "--workload", "w1"]
    assert main([*few, "--scheduler", "sync", "seamless"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split()[:3] == ["RUN", "TOK/S", "STEP"]
    assert [line.split()[0] for line in table[1:3]] == ["sync", "seamless"]
    assert main([*few, "--devices", "train", "rollout", "--policy", "never", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seamless never"]["shares"]["d1"]["train"] == 0
    for wrong, message in (
        (["--workload", "w9"], "workload='w9'"),
        (["--machine", "x"], "machine='x'"),
        (["--scheduler", "x"], "scheduler='x'"),
        (["--policy", "x"], "lending='x'"),
        (["--policy", "never"], "lending='never'"),
        (["--devices", "train"], "devices='train'"),
        (["--updates", "3"], "updates=3"),
        (["--ahead", "2"], "ahead=2"),
        (["--tail-batching", "0.2"], "tail_batching=0.2"),
        (["--steps", "3"], "steps=3"),
        (["--devices", "0*train+rollout"], "devices='0*train+rollout'"),
        (["--sampler-option", "rate=0.3"], "--sampler-option='rate=0.3': is not read by sampler None. Give --sampler"),
        (["--sampler", "gdro", "--sampler-option", "threshold=1"], "Give rate or least or most"),
        (["--sampler", "gdro", "--sampler-option", "least=few"], "--sampler-option least='few'"),
    ):
        assert main(wrong) == 2
        assert message in capsys.readouterr().err


def test_an_update_that_computes_a_group_s_prompt_once_takes_the_time_of_what_it_computes() -> None:
    """One step at a time, of 16 groups of 8 with prompts of 400 tokens: their other 7 are not computed again."""
    workload = SimulatedWorkload(samples=8, sigma=0.0, median=60.0, prompt_tokens=400)
    run = scenario(workload=workload, scheduler=Scheduler(max_staleness=0, updates=1))
    shared = replace(run, machine=replace(run.machine, shares_prompts=True))
    saved = 16 * 7 * 400 * run.machine.train_token_s / sum("train" in tags for tags in run.devices)
    assert simulate(run).step_s - simulate(shared).step_s == pytest.approx(saved, rel=0.01)
