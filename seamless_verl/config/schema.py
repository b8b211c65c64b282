"""The schema of the `seamless:` node: frozen dataclasses with the type, the bounds and the meaning of each setting.

Invariant: a parsed config holds known keys only, with values of their types and within their bounds; whoever has one
need not check again. The defaults equal those of `seamless.yaml`, and docs/settings.md is made of it. Nodes of
one concern alone are in `*_settings.py`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta
from omegaconf import DictConfig, OmegaConf

from seamless_verl.config.correction_settings import HARMLESS_STALENESS, CorrectionConfig
from seamless_verl.config.gateway_settings import GatewayConfig
from seamless_verl.config.renames import SETTINGS
from seamless_verl.config.sampler_settings import SamplerConfig
from seamless_verl.config.token_settings import TokensConfig
from seamless_verl.config.turn_settings import TurnsConfig
from seamless_verl.config.view_settings import ViewConfig
from seamless_verl.config.wait_settings import WatchdogConfig
from seamless_verl.resources.tags import Layout, Resources
from seamless_verl.runtime import fields
from seamless_verl.runtime.fields import Doc, NotNegative, Positive, PositiveNumber

NODE = "seamless"
Lending: TypeAlias = Literal["marginal", "step_boundary", "never"]
TailShare: TypeAlias = Annotated[float, Meta(gt=0, le=1)]
Console: TypeAlias = Literal["line", "verl"]


class Handover(StrEnum):
    """How a device that both trains and generates changes hands."""

    AUTO = "auto"
    """resident where both sides fit into a device, or on the CPU platform; else released, where verl would free the
    engine's cache (`rollout.free_cache_engine`)"""
    RESIDENT = "resident"
    """both sides stay in memory: calls are frozen in the engine while training computes"""
    CACHE_ONLY = "cache_only"
    """the engine releases its KV cache and keeps its weights: calls are cut, and continue when the cache is back"""
    RELEASED = "released"
    """the engine releases its memory: calls are cut, and continue when it has loaded the committed weights again"""

    @property
    def cuts_calls(self) -> bool:
        """Whether the engine loses the KV cache of its calls for training's time."""
        return self in (Handover.CACHE_ONLY, Handover.RELEASED)


class KvOnUpdate(StrEnum):
    """What a weight update does to the KV cache of the calls that it freezes."""

    RECOMPUTE = "recompute"
    """computed again under the new weights, so that every later token has the probability of one version"""
    KEEP = "keep"
    """kept: no time is lost, and the later tokens of those calls are of mixed weights"""


@dataclass(frozen=True)
class CpuConfig:
    """The devices of the CPU platform; read only when there is no accelerator."""

    devices: Annotated[
        Positive | None,
        Doc("how many devices a CPU declares; `null` is one for each usable core"),
    ] = None
    pin: Annotated[bool, Doc("whether each device has a core of its own")] = True

    @property
    def device_count(self) -> int:
        """Devices to declare: as set, else one for each core that this process may use."""
        return usable_cores() if self.devices is None else self.devices


@dataclass(frozen=True)
class WeightsConfig:
    """Weight updates: staged while the replicas generate, then loaded into a few of a host at a time, while the trainer
    computes."""

    at_once: Annotated[
        Positive,
        Doc(
            "replicas of a host that pause together in a weight update: each for one load from the host's memory, "
            "where the update was staged while all generated. Hosts load side by side. More at once end the update "
            "sooner; a replica pauses for longer if they share the memory's or the bus's speed. All pause together "
            "where none has a call",
        ),
    ] = 1
    kv: Annotated[
        KvOnUpdate,
        Doc(
            "KV cache of the calls that an update freezes: `recompute`, or `keep`, which also spares the "
            "later turns of their conversations from reading everything again: later tokens are then off "
            "by some 40% of what an update changed in their logprobs, 5e-4 on the mean for a step of 1e-4",
        ),
    ] = KvOnUpdate.RECOMPUTE


@dataclass(frozen=True)
class SeamlessConfig:
    """All settings of the `seamless:` node; `resources` is None when verl's own fields describe the machines."""

    layout: Annotated[
        Layout,
        Doc(
            "`colocated`: generate on the trainer's devices, in turns; `disaggregated`: on a pool of its "
            "own, `actor_rollout_ref.rollout.{nnodes,n_gpus_per_node}`; `multiplexed`: on both; `auto`: "
            "as the tags of `seamless.resources` imply, without them `disaggregated` when that pool has "
            "devices, else `colocated`",
        ),
    ] = Layout.AUTO
    max_staleness: Annotated[
        NotNegative | None,
        Doc(
            "oldest weights, in versions behind the trainer, whose tokens are trained on; `0` is "
            "on-policy. A hard bound: what could pass it is waited for, or dropped and counted after a "
            "resume under a smaller one. `null` is 4 where the loss corrects for old tokens, else 1; the run uses as "
            "little of it as keeps its engines busy, see `ahead`",
        ),
    ] = None
    ahead: Annotated[
        NotNegative | None,
        Doc(
            "at most so many + 1 steps' worth of prompts are outstanding at any time, refilled before "
            "each update; `0` draws none for a later step. `null` begins with half of `max_staleness`, rounded "
            "up, and takes more or less by what engines lose for want of calls while training waits; not less while "
            "the devices that generate are idle for more than 5% of a step",
        ),
    ] = None
    tail_batching: Annotated[
        TailShare | None,
        Doc(
            "with `max_staleness=0`: a step begins so many more prompts, as a share of `data.train_batch_size`, and "
            "trains the groups that finish first; the prompts left over begin again in a step made of such prompts. "
            "Every prompt is trained once an epoch, in an order that depends on the finish; `null` begins none more",
            way_out="Set {key}=0.2 for a fifth more, or null",
        ),
    ] = None
    min_sessions: Annotated[
        Positive | None,
        Doc(
            "sessions of a group that must have something to train. With fewer the group is dropped, and another "
            "prompt takes its place; with as many it is trained without those that failed. `null` is 2, or 1 where "
            "`actor_rollout_ref.rollout.n` is 1",
        ),
    ] = None
    lending: Annotated[
        Lending,
        Doc(
            "when the trainer's devices generate between two of its computations: `marginal` (when it is "
            "worth two hand-overs), `step_boundary` (verl's rule); `never` where no device both trains "
            "and generates",
        ),
    ] = "marginal"
    handover: Annotated[
        Handover,
        Doc(
            "how a device changes hands. `resident`: both sides stay in memory, calls freeze in the "
            "engine while training computes; `cache_only`: the engine releases its KV cache and keeps its "
            "weights, calls are cut and continue when the cache is back; `released`: the engine releases both, calls "
            "continue when it has loaded the committed weights again; `auto`: `resident` where the memory plan "
            "has room for both, and on the CPU platform, else `released` where "
            "`actor_rollout_ref.rollout.free_cache_engine` is on",
        ),
    ] = Handover.AUTO
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    tokens: TokensConfig = field(default_factory=TokensConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    cpu: CpuConfig = field(default_factory=CpuConfig)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    plot: Annotated[bool, Doc("end with a text plot of the validation reward")] = False
    console: Annotated[
        Console,
        Doc(
            "what `console` in `trainer.logger` prints of a step: `line`: one line with its reward, speed, idle time, "
            "staleness, how far ahead it chose to go, and longest wait; `verl`: verl's own, with every metric. All "
            "metrics are in `metrics.jsonl` beside the checkpoints"
        ),
    ] = "line"
    replica_restarts: Annotated[
        NotNegative,
        Doc(
            "how many times in a row a replica whose server or engine died, or that was given up, is started again on "
            "its devices, or on another node with its labels if its own is gone; it serves when it has the committed "
            "weights. The first start follows at once, the next ones "
            "after growing waits, and they count anew once it has served for half a minute. `0` starts none again"
        ),
    ] = 3
    loop_worker_restarts: Annotated[
        NotNegative,
        Doc(
            "how many times within ten minutes an agent loop worker that died is started again. Its prompts that had "
            "not ended begin again there: sessions whose agents had ended are taken up, runners go on, and an agent "
            "that ran in the worker begins again, with its replies from the journal. `0` ends the run instead, as more "
            "deaths do"
        ),
    ] = 3
    record_lending: Annotated[
        bool,
        Doc("write what the lending policy saw and decided to `lending.jsonl` beside the checkpoints"),
    ] = False
    record_lengths: Annotated[
        bool,
        Doc("write the lengths of all samples, and which were trained, to `lengths.jsonl` beside the checkpoints"),
    ] = False
    resources: Annotated[
        Resources | None,
        Doc(
            "the machines by their tags: a list of groups, each with `name`, `count`, `devices` (of one "
            "machine), `tags` and `labels` (of Ray's nodes); layout and verl's machine fields follow from "
            "it, `null` leaves them as set",
        ),
    ] = None
    device_memory_gb: Annotated[
        PositiveNumber | None,
        Doc(
            "memory of one device in GB (10^9 bytes), by which what would not fit is refused; `null` is "
            "what this machine's devices have",
            way_out="Set {key}=80 for 80 GB, or null",
        ),
    ] = None
    host_memory_gb: Annotated[
        PositiveNumber | None,
        Doc(
            "host memory of one machine with accelerators in GB (10^9 bytes), for staged weights and what is "
            "offloaded; `null` is what this machine has, if it has accelerators",
            way_out="Set {key}=1000 for 1000 GB, or null",
        ),
    ] = None
    wait_for_machines_s: Annotated[
        NotNegative,
        Doc(
            "with `seamless.resources`: seconds to wait for machines that an autoscaling cluster has yet to start, "
            "with a line every five seconds on what is waited for; `0` refuses at once",
        ),
    ] = 0
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    view: ViewConfig = field(default_factory=ViewConfig)
    turns: TurnsConfig = field(default_factory=TurnsConfig)

    @classmethod
    def parse(cls, node: DictConfig | Mapping[str, Any] | None) -> SeamlessConfig:
        """The node of a composed config; None, as when a config has no such node, gives the defaults.

        Raises:
            ConfigError: an unknown or renamed key, a missing value, or one of another type or out of its bounds;
                ConfigErrors where there are several.
        """
        tree = OmegaConf.to_container(node, resolve=True) if isinstance(node, DictConfig) else node
        return fields.read(cls, tree, key=NODE, renamed=SETTINGS)

    @property
    def staleness_bound(self) -> int:
        """`max_staleness`; where the run has yet to choose it, what does little harm under any loss."""
        return HARMLESS_STALENESS if self.max_staleness is None else self.max_staleness

    def sessions_needed(self, sessions: int) -> int:
        """How many of a group's sessions must have something to train, or it is dropped."""
        return min(sessions, 2 if self.min_sessions is None else self.min_sessions)

    def layout_for(self, rollout_nodes: int, devices_per_node: int) -> Layout:
        """The layout that follows from the machines' tags, or else from the size of verl's standalone rollout pool."""
        if self.resources is not None:
            return self.resources.layout
        if self.layout is not Layout.AUTO:
            return self.layout
        return Layout.DISAGGREGATED if rollout_nodes * devices_per_node > 0 else Layout.COLOCATED


def usable_cores() -> int:
    """Cores that this process may use; in a container they can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
