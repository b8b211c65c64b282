"""One run in three layouts, which differ only in the tags of the machines."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest
from support.job import run
from support.shared_memory import check_nothing_left, pieces

pytestmark = [pytest.mark.integration, pytest.mark.long]
DEVICE = re.compile(r"seamless/device/(.+-\d+)/(train|rollout)_share")
BOTH, TRAIN, ROLLOUT = "[train, rollout]", "[train]", "[rollout]"
LAYOUTS = {"colocated": (BOTH, BOTH), "disaggregated": (TRAIN, ROLLOUT), "multiplexed": (BOTH, ROLLOUT)}
"""The tags of two machines with a device each."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_run_under_other_tags(nano: Path, tmp_path: Path, layout: str) -> None:
    """On-policy, so that the trainer's logprobs show whether every token came from the weights of its step."""
    before, (first, second) = pieces(), LAYOUTS[layout]
    job = run(
        tmp_path,
        nano,
        seamless__resources=f"[{{count: 1, devices: 1, tags: {first}}}, {{count: 1, devices: 1, tags: {second}}}]",
        seamless__max_staleness=0,
        actor_rollout_ref__rollout__checkpoint_engine__backend="gloo",
        trainer__total_training_steps=4,
    )
    steps = job.metrics()
    assert steps.keys() == {1, 2, 3, 4}
    for metrics in steps.values():
        assert metrics["training/off_policy/trajectory_staleness_worst/max"] == 0
        assert metrics["training/rollout_logprob_diff_max"] < 2e-2
        assert metrics["actor/grad_norm"] > 0 == metrics["fleet/dead"]
    assert sorted(kinds_of_work(steps.values())) == sorted(tags.strip("[]").split(", ") for tags in (first, second))
    check_nothing_left(before)


def kinds_of_work(steps: Iterable[dict[str, float]]) -> list[list[str]]:
    """For each device, the kinds of work that the ledger counted in any step, training first."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for metrics in steps:
        for key, share in metrics.items():
            if (match := DEVICE.fullmatch(key)) is not None and share > 0:
                found[match[1]].add(match[2])
    return [sorted(kinds, reverse=True) for kinds in found.values()]
