"""How often verl's modes look for finished prompts: as shipped every 2.0 s, with `--short-poll` every 0.1 s. Pure.

A step of `sync` ends up to a poll later than its last sample. On a cluster that is little of a step; where a step takes
seconds it may be the larger part of what an arm of ours gains, so that a comparison says so.
"""

from __future__ import annotations

from dataclasses import replace

from seamless_verl.compare.arms import ComparedArm
from seamless_verl.compare.comparison import Comparison
from seamless_verl.compare.grid import sets

VERLS_POLL_S, SHORT_POLL_S = 2.0, 0.1
SHORT_STEP_S = 40.0
"""Steps below this are lengthened by more than a fortieth on the mean: by half a poll."""
BUFFER = "trainer.v1.sampler.custom_sampler"
MODULE = "pkg://seamless_verl.bench.training.polling"
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
