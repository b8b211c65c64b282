"""The schema of the `seamless:` node: frozen dataclasses with the type, the bounds and the meaning of each setting.

Invariant: a parsed config holds known keys only, with values of their types and within their bounds; whoever has one
need not check again. The defaults equal those of `seamless.yaml`, and docs/settings.md is made of this module.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args

from omegaconf import DictConfig, OmegaConf

from seamless_verl.config.renames import SETTINGS
from seamless_verl.resources.tags import Layout, Resources
from seamless_verl.runtime import fields
from seamless_verl.runtime.fields import Doc, NotNegative, Positive, PositiveNumber, Text

NODE = "seamless"
Lending: TypeAlias = Literal["marginal", "step_boundary", "never"]
TokenPolicy: TypeAlias = Literal["train_all", "mask_older_than", "drop_if_older_than", "fresh_tail_only"]
LENDING_POLICIES: tuple[str, ...] = get_args(Lending)
TOKEN_POLICIES: tuple[str, ...] = get_args(TokenPolicy)  # those of trajectory/policies.py
JOURNAL = "trajectories.sqlite"


class Handover(StrEnum):
    """How a device that both trains and generates changes hands."""

    AUTO = "auto"
    """released where verl would free the engine's cache (`rollout.free_cache_engine`), resident on the CPU platform"""
    RESIDENT = "resident"
    """both sides stay in memory: calls are frozen in the engine while training computes"""
    RELEASED = "released"
    """the engine releases its memory: calls are cut, and continued after the next weight commit"""


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
class GatewayConfig:
    """The gateway: the APIs that users' own agents call, and the journal of their sessions."""

    enabled: Annotated[bool, Doc("serve OpenAI and Anthropic APIs for agents of your own")] = False
    port: Annotated[
        NotNegative,
        Doc("where the gateway listens, also after a restart of its process; `0` is any free port"),
    ] = 0
    journal: Annotated[
        Text | None,
        Doc("the journal's file; `null` is `trajectories.sqlite` beside the checkpoints"),
    ] = None
    options: Annotated[
        tuple[str, ...],
        Doc(
            "options of `vllm serve` that concern requests: "
            """`'seamless.gateway.options=["--enable-auto-tool-choice","--tool-call-parser=hermes"]'`; a """
            "reasoning parser becomes the engines' too",
            way_out="""Write it as '{key}=["--one","--two=2"]'""",
        ),
    ] = ()
    shards: Annotated[
        Positive,
        Doc(
            "processes that share sessions and calls, spread over the nodes; each of several has a port "
            "of its own, from `port` on, and a journal of its own, `trajectories-<n>.sqlite`",
        ),
    ] = 1
    max_failed_groups: Annotated[
        Positive,
        Doc(
            "groups of sessions that may fail in a row, without a success, before the run ends with the "
            "last one's error",
        ),
    ] = 32

    def journal_of(self, shard: int, folder: str) -> Path:
        """The journal's file of one shard: `trajectories.sqlite`, or `trajectories-<shard>.sqlite` of several.

        It is in `folder` unless `journal` is set.
        """
        path = Path(self.journal) if self.journal else Path(folder, JOURNAL)
        return path if self.shards == 1 else path.with_name(f"{path.stem}-{shard}{path.suffix}")


@dataclass(frozen=True)
class WeightsConfig:
    """Weight updates: staged while the replicas generate, then loaded into a few of them at a time."""

    at_once: Annotated[
        Positive,
        Doc(
            "replicas that pause together in a weight update: each for one load from its host's memory, "
            "where the update was staged while all generated",
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
class TokensConfig:
    """Which generated tokens of a batch are trained: a policy of trajectory/policies.py."""

    policy: Annotated[
        TokenPolicy,
        Doc(
            "which tokens are trained, by their weight version: all, those not older than `older_than`, "
            "only whole sequences of such tokens, or those after the last token that is not on-policy",
        ),
    ] = "train_all"
    older_than: Annotated[
        NotNegative,
        Doc(
            "for `mask_older_than` and `drop_if_older_than`: versions that a token may be behind the trainer",
        ),
    ] = 0


@dataclass(frozen=True)
class WatchdogConfig:
    """Limits of time, in seconds."""

    transition_s: Annotated[
        Positive,
        Doc(
            "seconds: a replica that takes longer to pause, to load weights or to start is given up, and "
            "its calls continue on others",
        ),
    ] = 300
    no_progress_s: Annotated[
        Positive,
        Doc("seconds: a run that makes no progress for so long ends, with a report of what did not move"),
    ] = 3600


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
        NotNegative,
        Doc(
            "oldest weights, in versions behind the trainer, whose tokens are trained on; `0` is "
            "on-policy. A hard bound: what could pass it is waited for, or dropped and counted after a "
            "resume under a smaller one",
        ),
    ] = 1
    ahead: Annotated[
        NotNegative | None,
        Doc(
            "at most so many + 1 steps' worth of prompts are outstanding at any time, refilled before "
            "each update; `0` draws none for a later step, `null` as many as `max_staleness` allows",
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
            "engine while training computes; `released`: the engine releases its memory, calls are cut "
            "and continued after the next commit; `auto`: on an accelerator `released` where "
            "`actor_rollout_ref.rollout.free_cache_engine` asks for it, `resident` on the CPU platform",
        ),
    ] = Handover.AUTO
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    tokens: TokensConfig = field(default_factory=TokensConfig)
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    cpu: CpuConfig = field(default_factory=CpuConfig)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    plot: Annotated[bool, Doc("end with a text plot of the validation reward")] = False
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
    wait_for_machines_s: Annotated[
        NotNegative,
        Doc(
            "seconds to wait for machines that an autoscaling cluster has yet to start; `0` refuses at once",
        ),
    ] = 0

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
    def batches_ahead(self) -> int:
        """Steps' worth of prompts that generate beyond those of the current step."""
        return self.max_staleness if self.ahead is None else min(self.ahead, self.max_staleness)

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
