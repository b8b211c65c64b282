"""Comparisons without any run: what a trainer would have logged, and the report that is made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from seamless_verl.runtime.sample_lengths import RecordedLengths
from seamless_verl.tools.compare.budget import Difference
from seamless_verl.tools.compare.comparison import ArmFacts, Comparison, Run, RunState
from seamless_verl.tools.compare.figures import StepSize, run_figures, step_figures
from seamless_verl.tools.compare.lengths import length_bias

SIZE = StepSize(samples=128, group=8, updates=4)
SKIP = 2
OTHERS = (
    Difference("trainer.v1.trainer_mode", "seamless", "sync"),
    Difference("actor_rollout_ref.actor.policy_loss.loss_mode", "dppo_tv", "vanilla"),
    Difference("seamless.max_staleness", "4", "not read"),
    Difference("actor_rollout_ref.actor.clip_ratio", "0.15", "0.2"),
)


def logged(
    steps: int, *, seconds: float, reward: float = 0.0, staleness: float = 0.0, evicted: int = 0, start: float = 60.0
) -> list[dict[str, Any]]:
    """The log of a run whose steps all take as long, and whose reward rises by `reward` a step; 512 response tokens."""
    return [
        {
            "step": step,
            "at": start + seconds * step,
            "data": {
                "perf/total_num_tokens": 1664,
                "response_length/mean": 4.0,
                "prompt_length/mean": 9.0,
                "critic/score/mean": 0.01 + reward * step,
                "training/off_policy/trajectory_staleness_worst/mean": staleness,
                "training/off_policy/trajectory_staleness_worst/max": staleness,
                "training/off_policy/evicted_samples": evicted,
                "timing_s/step": seconds,
            },
        }
        for step in range(1, steps + 1)
    ]


def finished(arm: str, seed: int, log: Sequence[dict[str, Any]], *, idle: float | None = 0.3) -> Run:
    steps = step_figures(log, SIZE, lambda began, ended: idle)
    return Run(arm, seed, 1, RunState.FINISHED, tuple(steps), run_figures(steps, SIZE, skip=SKIP, idle=idle))


def comparison(
    *, runs: Sequence[Run] | None = None, interrupted: bool = False, steps: int = 12, different: bool = True
) -> Comparison:
    """Two seeds of `sync` and of ours, which is faster, and an arm that failed."""
    given = [
        *(finished("sync", seed, logged(12, seconds=2.0 + 0.1 * seed, reward=0.01), idle=0.45) for seed in (1, 2)),
        *(
            finished("seamless", seed, logged(12, seconds=1.2 + 0.1 * seed, reward=0.009 + seed / 1e3, staleness=1.0))
            for seed in (1, 2)
        ),
        Run(
            "separate_async", 1, 1, RunState.FAILED, reason="code 1, 0 of 12 steps\nno <device> left", log="/x/log.txt"
        ),
        Run("separate_async", 2, 1, RunState.NOT_MADE, reason="interrupted"),
    ]
    return Comparison(
        title="sums: sync, seamless, separate_async",
        baseline="sync",
        runs=tuple(given if runs is None else runs),
        steps=steps,
        skip=SKIP,
        conditions=("12 steps of 128 samples on 2 devices (the CPU platform, a core each).", "Versions: verl 0.9.1."),
        command="seamless-verl compare arithmetic_grpo --steps 12",
        differences={"seamless": OTHERS} if different else {},
        interrupted=interrupted,
    )


def frontier() -> Comparison:
    """Two seeds of `sync`, of `colocate_async` and of ours at two bounds, one run of which collapses."""
    facts = {
        "sync": ArmFacts("sync", permitted=0, shipped_poll=True),
        "colocate_async": ArmFacts("sync", shipped_poll=True),
        "seamless s=0": ArmFacts("sync", permitted=0, line="seamless"),
        "seamless s=4": ArmFacts("sync", permitted=4, line="seamless"),
    }
    fallen = logged(12, seconds=1.0, reward=0.02, staleness=3.0)
    for row in fallen[8:]:
        row["data"]["critic/score/mean"] = 0.0
    in_order = RecordedLengths(24, {place: (place, place + 9) for place in range(24)}, tuple(range(20)))
    short_first = RecordedLengths(24, {place: (90 - place, 99 - place) for place in range(24)}, tuple(range(4, 24)))
    runs = [
        *(finished("sync", seed, logged(12, seconds=2.0, reward=0.01)) for seed in (1, 2)),
        *(finished("colocate_async", seed, logged(12, seconds=1.5, reward=0.01, staleness=6.0)) for seed in (1, 2)),
        *(
            with_lengths(finished("seamless s=0", seed, logged(12, seconds=1.5, reward=0.01)), in_order)
            for seed in (1, 2)
        ),
        with_lengths(finished("seamless s=4", 1, logged(12, seconds=1.0, reward=0.02, staleness=3.0)), short_first),
        with_lengths(finished("seamless s=4", 2, fallen), in_order),
    ]
    return replace(comparison(runs=runs), arms=facts)


def with_lengths(run: Run, lengths: RecordedLengths) -> Run:
    return replace(run, lengths=lengths, bias=length_bias(lengths))
