"""A simulated run finds how far to go ahead with the objects of a real one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from seamless_verl.errors import ConfigError
from seamless_verl.resources.ahead import WORTH, AheadLevel, EngineUse
from seamless_verl.tools.simulator.__main__ import make_parser, scenarios
from seamless_verl.tools.simulator.scenario import WORKLOADS, Scenario, Scheduler
from seamless_verl.tools.simulator.simulate import Simulation


def simulated(*arguments: str) -> Simulation:
    (scenario,) = scenarios(make_parser().parse_args(list(arguments))).values()
    return Simulation(scenario)


def found(*arguments: str) -> Simulation:
    """The simulation of that command line after its run."""
    simulation = simulated(*arguments, "--ahead", "auto")
    simulation.run()
    return simulation


@pytest.mark.parametrize(("workload", "level"), [("w1", 1), ("w2", 2), ("w3", 2)])
def test_it_finds_the_level_at_which_most_tokens_are_trained(workload: str, level: int) -> None:
    """But for what older tokens are not worth, and no lower level is as good."""
    options = ("--workload", workload, "--max-staleness", "4", "--seats", "64", "--updates", "1")
    simulation = found(*options)
    assert isinstance(simulation.ahead.level, AheadLevel) and isinstance(simulation.ahead.use, EngineUse)
    assert simulation.ahead.batches == level
    speeds = {ahead: simulated(*options, "--ahead", str(ahead)).run().tokens_per_s for ahead in (1, 2, 3, 4)}
    assert speeds[level] >= (1 - WORTH) * max(speeds.values())
    assert all(speeds[lower] < 0.98 * speeds[level] for lower in range(1, level))


def test_where_engines_are_always_full_one_step_is_enough() -> None:
    assert found("--workload", "w1", "--max-staleness", "8", "--seats", "4").ahead.batches == 1


def test_what_is_given_is_not_looked_for() -> None:
    simulation = Simulation(Scenario(WORKLOADS["w1"], scheduler=Scheduler(max_staleness=4, ahead=3), steps=4))
    simulation.run()
    assert simulation.ahead.level is None and simulation.ahead.batches == 3
    with pytest.raises(ConfigError, match="ahead=3: is found"):
        replace(Scheduler(max_staleness=4, ahead=3), finds_ahead=True)
