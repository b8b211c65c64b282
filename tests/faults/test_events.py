"""Lend, reclaim, update, death and resume events in a row on a live run, several at a time: after each, all goes on.

Half of the calls are groups of DARS, whose generated tokens are all trained or dropped.

SEAMLESS_EVENTS=1000 makes it as long as the promise, SEAMLESS_SEED draws the same events again.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.events_groups import SampledGroups
from support.events_run import CALLS, SAMPLES, ChaosRun, RunSummary, Sample
from support.events_world import cluster, world
from support.version_weights import Weights

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.serial]
EVENTS = int(os.environ.get("SEAMLESS_EVENTS", "200"))
SEED = int(os.environ.get("SEAMLESS_SEED", str(random.randrange(1 << 32))))


def largest_error(samples: Sequence[Sample], weights: Weights, shift: int = 0) -> float:
    """Of every token's logprob against transformers under its version's weights, or those `shift` versions later."""
    worst = 0.0
    for version in sorted({version for sample in samples for version in sample.done.versions}):
        model = weights.model(version + shift)
        for sample in samples:
            worst = max(worst, error_under(model, sample, version))
    return worst


def error_under(model: Any, sample: Sample, version: int) -> float:
    chosen = torch.tensor(sample.done.versions) == version
    if not chosen.any():
        return 0.0
    ids = torch.tensor(sample.prompt + sample.done.ids)
    with torch.no_grad():
        rows = model(ids[None]).logits[0, len(sample.prompt) - 1 : -1].log_softmax(-1)
    found = rows.gather(1, ids[len(sample.prompt) :, None])[:, 0]
    return float((found - torch.tensor(sample.done.logprobs)).abs()[chosen].max())


@pytest.mark.timeout(3600)
def test_no_row_of_events_stops_a_call_or_loses_a_token(nano: Path) -> None:
    sys.stdout.write(f"\nSEAMLESS_EVENTS={EVENTS} SEAMLESS_SEED={SEED}\n")

    async def scenario() -> tuple[RunSummary, SampledGroups]:
        async with world(nano / "model") as running:
            run = ChaosRun(running, number=EVENTS, seed=SEED)
            return await run.run(), run.groups

    with cluster():
        summary, groups = asyncio.run(scenario())
    assert summary.events.total() == EVENTS and summary.calls > CALLS
    assert not groups.open and min(groups.outcomes[end] for end in ("reopened", "trained", "dropped")) > 0
    assert groups.tokens["generated"] == groups.tokens["trained"] + groups.tokens["dropped"] > 0
    samples = [sample for kept in summary.samples.values() for _, _, sample in kept]
    error, weights = largest_error(samples, Weights(nano / "model")), Weights(nano / "model")
    sys.stdout.write(
        f"{EVENTS} events in {summary.seconds:.0f} s, {summary.overlapping} of them beside others: "
        f"{dict(summary.events)}\n"
        f"{summary.calls} calls, {summary.tokens} tokens of {summary.versions} versions, longest wait of a call "
        f"{summary.longest:.1f} s; logprob error of {len(samples)} calls {error:.1e}\n"
        f"groups under DARS {dict(groups.outcomes)}, tokens {dict(groups.tokens)}\n"
    )
    assert error < 1e-3
    assert largest_error(samples[:20], weights, shift=1) > 0.1, "wrong weights would not have been told apart"
    mixed = len(summary.samples[True])
    assert mixed >= min(SAMPLES, summary.versions // 2), f"{mixed} calls had several versions: most updates met no call"
