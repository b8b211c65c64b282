"""Samplers in virtual time: the same objects as in the trainer, under the same bound."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seamless_verl.algorithms.samplers import SAMPLERS
from seamless_verl.errors import ConfigError
from seamless_verl.tools.simulator.__main__ import main
from seamless_verl.tools.simulator.scenario import Scenario, Scheduler, SimulatedWorkload
from seamless_verl.tools.simulator.simulate import Simulation, simulate

RATES = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0)
SMALL = SimulatedWorkload(prompts=4, samples=4, median=20.0, sigma=1.0, cap=200, pass_rates=RATES)


def scenario(sampler: str | None, **more: Any) -> Scenario:
    return Scenario(SMALL, steps=10, warmup=1, seats=16, sampler=sampler, **more)


@settings(max_examples=25)
@given(st.sampled_from(sorted(SAMPLERS)), st.integers(0, 1), st.integers(1, 100))
def test_groups_add_up_and_the_bound_holds(sampler: str, staleness: int, seed: int) -> None:
    """Simulation.run checks that groups submitted, judged and seconds add up."""
    scheduler = Scheduler(max_staleness=staleness)
    simulation = Simulation(scenario(sampler, scheduler=scheduler, seed=seed))
    result = simulation.run()
    assert result.max_staleness <= staleness
    assert simulation.groups.trained == 10 * SMALL.prompts
    trained = [size for sizes in simulation.prompts.sizes.values() for size in sizes]
    assert len(trained) == 10 * SMALL.prompts and min(trained) >= 2
    assert simulate(scenario(sampler, scheduler=scheduler, seed=seed)) == result


def test_hard_prompts_get_more() -> None:
    dars, gdro = simulate(scenario("dars")).samples, simulate(scenario("gdro")).samples
    assert dars["0.125"] > dars["0.5"] >= dars["0.75"] >= 4 and not {"0", "1"} & dars.keys()
    assert gdro["0"] > gdro["0.5"] > gdro["1"] >= 2


def test_prompts_that_are_learned_are_left_out() -> None:
    sizes = Simulation(scenario("srpo"))
    sizes.run()
    counts = {rate: len(found) for rate, found in sizes.prompts.sizes.items()}
    assert counts[1.0] < counts[0.0] == max(counts.values())
    lasting = Simulation(scenario("srpo", sampler_options={"threshold": 0.9}))
    lasting.run()
    assert len(lasting.prompts.sizes[1.0]) < counts[1.0]


def test_without_a_sampler_the_pass_rates_change_nothing() -> None:
    with_rates = scenario(None)
    assert simulate(with_rates) == simulate(replace(with_rates, workload=replace(SMALL, pass_rates=())))


def test_the_first_samples_of_a_group_are_the_same_with_more() -> None:
    assert SMALL.group(1, 7, first=4, last=9) == SMALL.group(1, 7, last=9)[4:]
    assert SMALL.group(1, 7, last=9)[:4] == SMALL.group(1, 7)
    as_benched = replace(SMALL, bench="w1")
    assert as_benched.group(1, 7) + as_benched.group(1, 7, first=4, last=9) == as_benched.group(1, 7, last=9)


def test_a_sampler_without_prompts_to_sample_is_refused() -> None:
    with pytest.raises(ConfigError, match="the workload has no pass rates"):
        Scenario(replace(SMALL, pass_rates=()), sampler="dars")
    with pytest.raises(ConfigError, match="tail batching drops prompts that it may reopen"):
        scenario("dars", scheduler=Scheduler(max_staleness=0, tail_batching=0.2))
    learned = replace(SMALL, pass_rates=(1.0,))
    with pytest.raises(ConfigError, match="every prompt is left out"):
        simulate(replace(scenario("srpo", sampler_options={"threshold": 0.9}), workload=learned))


def test_the_command_passes_the_samplers_options(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--workload", "w1", "--sampler", "gdro", "--steps", "8", "--pass-rates", "0.25", "1", "--json"]
    for options, alike in (([], False), (["--sampler-option", "least=4", "most=4"], True)):
        assert main([*few, *options]) == 0
        sizes = json.loads(capsys.readouterr().out)["seamless"]["samples"].values()
        assert (set(sizes) == {4.0}) is alike


def test_the_command_shows_the_sizes_of_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--sampler", "gdro", "--steps", "8", "--pass-rates", "0.25", "1"]) == 0
    assert "SAMPLES OF A GROUP" in capsys.readouterr().out
    assert main(["--sampler", "none"]) == 2
    assert f"Choose one of {sorted(SAMPLERS)}" in capsys.readouterr().err
