"""How often verl's modes look for finished prompts: as shipped every 2.0 s, with `--short-poll` every 0.1 s. Pure.

A step of `sync` ends up to a poll later than its last sample. On a cluster that is little of a step; where a step takes
seconds it may be the larger part of what an arm of ours gains, so that a comparison says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from seamless_verl.tools.compare.arms import ComparedArm
from seamless_verl.tools.compare.budget import select
from seamless_verl.tools.compare.comparison import Comparison
from seamless_verl.tools.compare.grid import sets

VERLS_POLL_S, SHORT_POLL_S = 2.0, 0.1
SHORT_STEP_S = 40.0
"""Steps below this are lengthened by more than a fortieth on the mean: by half a poll."""
SAMPLER = "trainer.v1.sampler"
BUFFER = f"{SAMPLER}.custom_sampler"
MODULE = "pkg://seamless_verl.tools.bench.training.polling"
MARK = f"poll={SHORT_POLL_S:g}"


def short_poll(mode: str) -> dict[str, str]:
    """The settings that give one of verl's modes its own buffer with a shorter poll."""
    name = "PollingReplayBuffer" if mode == "sync" else "PollingReplayBufferAsync"
    return {f"{BUFFER}.path": MODULE, f"{BUFFER}.name": name}


def with_short_poll(arm: ComparedArm) -> ComparedArm:
    """The arm with verl's own buffer and a shorter poll; one of ours, or with a buffer of its own, stays as it is."""
    if arm.is_ours or sets(arm, f"{BUFFER}.path"):
        return arm
    more = [f"{key}={value}" for key, value in short_poll(arm.mode).items()]
    return replace(arm, text=":".join([arm.text, *more]), name=f"{arm.name} {MARK}", settings=(*arm.settings, *more))


def verls_own_buffer(config: Mapping[str, Any]) -> bool:
    """Whether a mode of verl's with this composed config samples as verl does, at whichever poll."""
    return select(config, f"{BUFFER}.path") in (None, MODULE)


def filtering(config: Mapping[str, Any], metric: str | None, *, sync: bool) -> dict[str, Any]:
    """What verl gives its own buffers and no custom one (`PPOTrainer._build_replay_buffer`): how groups are filtered.

    `metric` is the one by which DAPO filters groups, None where it does not.
    """
    refills = bool(select(config, f"{SAMPLER}.sync_refill_failed_groups"))
    found = {"filter_groups_metric": metric, "sync_refill_failed_groups": refills}
    if not sync:
        return found
    batch = select(config, "data.train_batch_size")
    fetched = 1 if metric is not None or refills else select(config, "data.gen_batch_size") or batch
    inflight = select(config, "algorithm.filter_groups.max_inflight_gen_batches") if metric is not None else None
    more = {"train_batch_size": batch, "gen_batch_size": fetched}
    return found | more | {"max_inflight_gen_batches": 1 if inflight is None else inflight}


def poll_line(comparison: Comparison) -> str:
    """That verl's modes poll as they are shipped, for those whose steps are short; "" if there is none."""
    steps = {
        summary.arm: summary.step_s.median
        for summary in comparison.summaries
        if summary.step_s is not None and summary.arm in comparison.arms and comparison.arms[summary.arm].shipped_poll
    }
    short = {arm: seconds for arm, seconds in steps.items() if seconds < SHORT_STEP_S}
    if not short:
        return ""
    return (
        f"{', '.join(short)}: verl looks for finished prompts every {VERLS_POLL_S:g} s, and a step takes "
        f"{min(short.values()):.1f} s here; with --short-poll it looks every {SHORT_POLL_S:g} s."
    )
