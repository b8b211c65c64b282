"""After each event of a simulated run a call is in one place only, and of a group that is still generated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from seamless_verl.algorithms.samplers import SAMPLERS
from seamless_verl.tools.simulator.engine import SimulatedGroup
from seamless_verl.tools.simulator.machine import MachineProfile
from seamless_verl.tools.simulator.scenario import BOTH, ROLLOUT, Scenario, Scheduler, SimulatedWorkload
from seamless_verl.tools.simulator.simulate import Simulation

SMALL = SimulatedWorkload(prompts=4, samples=2, median=30.0, sigma=1.0, cap=300)
DEVICES = (BOTH, BOTH, ROLLOUT, ROLLOUT, ROLLOUT)


def simulation(**more: Any) -> Simulation:
    """Whose cluster checks after each event where its calls are."""
    run = Simulation(Scenario(**{"workload": SMALL, "devices": DEVICES, "steps": 8, "warmup": 1, "seats": 4, **more}))
    advance = run.cluster.advance

    def checked() -> None:
        advance()
        running = [sample for device in run.cluster.devices for sample in device.engine.samples]
        waiting = [entry[2] for entry in run.cluster._queue]
        assert len({*running, *waiting}) == len(running) + len(waiting)
        assert all(sample.group in run.groups.generating for sample in (*running, *waiting))

    run.cluster.advance = checked  # type: ignore[method-assign]
    return run


@given(st.sampled_from(["marginal", "step_boundary"]), st.booleans(), st.integers(0, 5))
@settings(max_examples=25, deadline=None)
def test_all_tokens_of_what_was_submitted_are_generated_once(policy: str, keep_cache: bool, seed: int) -> None:
    run = simulation(scheduler=Scheduler(policy=policy, max_staleness=1, keep_cache=keep_cache), seed=seed)
    submitted, submit = list[SimulatedGroup](), run.groups.submit
    run.groups.submit = lambda group: (submitted.append(group), submit(group))  # type: ignore[assignment,func-returns-value]
    result = run.run()
    assert result.max_staleness <= 1 and result.max_token_age <= 1
    assert run.groups.trained == 8 * SMALL.prompts
    for group in submitted:
        for sample in group.samples:
            assert sample.generated <= sample.tokens + 1e-4
            assert group.unfinished or abs(sample.generated - sample.tokens) < 1e-4


@given(
    st.one_of(
        st.just({"scheduler": Scheduler(carry_s=0.2)}),
        st.builds(
            lambda updates: {"scheduler": Scheduler(max_staleness=0, updates=updates, carry_s=0.2, tail_batching=0.5)},
            st.sampled_from([1, 4]),
        ),
        st.builds(
            lambda sampler: {"sampler": sampler, "scheduler": Scheduler(carry_s=0.2)}, st.sampled_from(sorted(SAMPLERS))
        ),
    ),
    st.integers(0, 5),
)
@settings(max_examples=40, deadline=None)
def test_tail_batching_and_samplers_train_every_prompt_in_time(more: dict[str, Any], seed: int) -> None:
    workload = replace(SMALL, samples=4, pass_rates=(0.0, 0.25, 0.5, 1.0))
    run = simulation(workload=workload, machine=MachineProfile(dispatch_s=0.2), seed=seed, **more)
    result = run.run()
    assert run.groups.trained == 8 * SMALL.prompts
    assert max(result.max_staleness, result.max_token_age) <= run.scenario.scheduler.max_staleness
    assert run.trainer.tail.deferred == [] and run.groups.deferred == run.trainer.tail.begun_again
