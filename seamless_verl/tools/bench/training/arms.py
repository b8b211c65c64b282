"""The arms of the training bench: verl's trainer modes, as shipped and with a shorter poll, and ours.

An arm is data: a name, which main job runs it, and its overrides. All arms train on two devices.
Names are `sync`, `colocate_async`, `separate_async`, `separate_async-switch`, each also with `-poll`, and
`seamless-<layout>-s<max_staleness>`, each also with `-ahead<n>`, with `-keep` (of the KV cache at a commit), with
`-streamed` and with `-tail<n>` (tail batching with n percent more prompts); and `seamless-default`, which sets nothing
but the mode. Pure: strings only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch

from seamless_verl.errors import ConfigError
from seamless_verl.tools.bench.training.workloads import Workload
from seamless_verl.tools.compare.polls import short_poll

VERL, SEAMLESS = "verl.trainer.main_ppo", "seamless_verl.main_ppo"
MINI_BATCH = 4  # prompts, in every arm: each takes the same optimizer steps on the same amount of data
MODE = "trainer.v1.trainer_mode"
Overrides = Mapping[str, object]


@dataclass(frozen=True)
class Arm:
    """One trainer under one set of settings; `trains` is how many of the two devices ever train."""

    name: str
    main: str
    trains: int
    overrides: Overrides = field(default_factory=dict)


def separate_devices() -> dict[str, object]:
    """One device for the trainer, another in a pool that only generates."""
    rollout = "actor_rollout_ref.rollout"
    return {
        "trainer.n_gpus_per_node": 1,
        f"{rollout}.nnodes": 1,
        f"{rollout}.n_gpus_per_node": 1,
        f"{rollout}.checkpoint_engine.backend": "gloo",
    }


def shared_devices() -> dict[str, object]:
    """Both devices train and generate."""
    return {"trainer.n_gpus_per_node": 2}


def verl_arms(workload: Workload) -> list[Arm]:
    updates = workload.prompts // MINI_BATCH  # separate_async takes one mini-batch at a time
    separate = separate_devices() | {"trainer.v1.separate_async.parameter_sync_step": updates, MODE: "separate_async"}
    switch = "trainer.v1.separate_async.hybrid_rollout.enable_switch"
    modes = (
        Arm("sync", VERL, 2, {**shared_devices(), MODE: "sync"}),
        Arm("colocate_async", VERL, 2, {**shared_devices(), MODE: "colocate_async"}),
        Arm("separate_async", VERL, 1, separate),
        Arm("separate_async-switch", VERL, 1, separate | {switch: True}),
    )
    return [arm for mode in modes for arm in (mode, with_short_poll(mode))]


def with_short_poll(arm: Arm) -> Arm:
    """The same mode with a shorter poll for finished samples, through verl's own setting."""
    return Arm(f"{arm.name}-poll", arm.main, arm.trains, {**arm.overrides, **short_poll(str(arm.overrides[MODE]))})


LAYOUTS = {
    "colocated": (2, shared_devices),
    "disaggregated": (1, separate_devices),
    "multiplexed": (1, separate_devices),
}
STALENESS = (0, 1, 4)
DEFAULT = "seamless-default"
OURS = re.compile(rf"seamless-({'|'.join(LAYOUTS)})-s(\d+)(?:-ahead(\d+))?(-keep)?(-streamed)?(?:-tail(\d+))?")


def parse_our_arm(workload: Workload, name: str) -> Arm | None:
    """Our arm of that name; None for a name of another form."""
    if name == DEFAULT:
        return Arm(name, SEAMLESS, 2, {**shared_devices(), MODE: "seamless"})
    match = OURS.fullmatch(name)
    if match is None:
        return None
    layout, staleness, ahead, keeps_cache, streamed, extra = match[1], int(match[2]), *match.groups()[2:]
    trains, devices = LAYOUTS[layout]
    updates = {"trainer.v1.seamless.parameter_sync_step": workload.prompts // MINI_BATCH} if streamed else {}
    node = {MODE: "seamless", "seamless.layout": layout, "seamless.max_staleness": staleness}
    node |= {} if ahead is None else {"seamless.ahead": int(ahead)}
    node |= {"seamless.weights.kv": "keep"} if keeps_cache else {}
    node |= {} if extra is None else {"seamless.tail_batching": int(extra) / 100}
    return Arm(name, SEAMLESS, trains, {**devices(), **node, **updates})


def begins_prompts_again(name: str) -> bool:
    """Whether the arm of that name generates some prompts twice, by tail batching."""
    match = OURS.fullmatch(name)
    return match is not None and match[6] is not None


def default_arms(workload: Workload) -> list[Arm]:
    """The arms of `--arms all`. Ours take any other staleness too."""
    names = [DEFAULT]
    names += [f"seamless-{layout}-s{n}{end}" for layout in LAYOUTS for n in STALENESS for end in ("", "-streamed")]
    ours = (parse_our_arm(workload, name) for name in names)
    return [*verl_arms(workload), *(arm for arm in ours if arm is not None)]


def arms_named(workload: Workload, patterns: Sequence[str]) -> list[Arm]:
    """Arms by name or shell pattern, in the order given, each once; ConfigError for a pattern that matches none."""
    available = default_arms(workload)
    chosen: dict[str, Arm] = {}
    for pattern in patterns:
        wanted = "*" if pattern == "all" else pattern
        found = [arm for arm in available if fnmatch(arm.name, wanted)]
        if not found and (ours := parse_our_arm(workload, pattern)) is not None:
            found = [ours]
        if not found:
            names = ", ".join(arm.name for arm in available)
            more = "ours take any -s<n>, then -ahead<n>, -keep and -streamed in this order, then -tail<n>"
            way_out = f"Choose from {names}, or a pattern such as '*-poll'; {more}"
            raise ConfigError("--arms", pattern, "no arm has that name", way_out)
        chosen |= {arm.name: arm for arm in found}
    return list(chosen.values())
