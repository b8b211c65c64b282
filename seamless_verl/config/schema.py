"""The schema of the `seamless:` node: each setting's name, type, bounds, default and meaning.

A parsed config holds known keys only, with values of their types and within their bounds; whoever has one need not
check again. `seamless.yaml` and docs/settings.md are made of it (`python -m seamless_verl.config --help`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from annotated_types import Ge, Gt, Le
from omegaconf import DictConfig, OmegaConf
from pydantic import PlainValidator, StringConstraints, WithJsonSchema

from seamless_verl.errors import ConfigError
from seamless_verl.resources.tags import Layout, Resources
from seamless_verl.runtime import fields
from seamless_verl.runtime.fields import NotNegative, Positive, PositiveNumber, SettingsNode, Text, way_out

NODE = "seamless"
JOURNAL = "trajectories.sqlite"
LAST_PORT = 65535
JOURNAL_DAYS = 7.0  # for which a journal keeps a session after it was handed over to training
HARMLESS_STALENESS = 1
"""Versions that a token may be behind the trainer without a correction: tools/compare/rewards.md has what it costs."""
CORRECTED_STALENESS = 4
"""Versions that a token may be behind the trainer where the loss corrects: the most that was compared with none."""

Drafts: TypeAlias = Literal["off", "suffix"]
Lending: TypeAlias = Literal["marginal", "step_boundary", "never"]
GrammarPolicy: TypeAlias = Literal["train_all", "mask_forced", "mask_all"]
SamplerName: TypeAlias = Literal["dars", "dars_hardness", "gdro", "srpo", "xrpo"]
TokenPolicy: TypeAlias = Annotated[
    str,
    StringConstraints(pattern=r"^(train_all|fresh_tail_only|(mask|drop_if)_older_than(:\d+)?)$"),
    way_out("Set {key}=train_all, fresh_tail_only, mask_older_than:1 or drop_if_older_than:1"),
]
Machines: TypeAlias = Annotated[
    Resources | None,
    PlainValidator(lambda given: given if isinstance(given, Resources) else Resources.parse(given)),
    WithJsonSchema({"anyOf": [{"type": "array"}, {"type": "null"}]}),
]


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
class WeightsConfig(SettingsNode):
    """Weight updates: staged while the replicas generate, then loaded, one replica of a host after the other."""

    kv: KvOnUpdate = KvOnUpdate.RECOMPUTE
    """KV cache of calls that an update freezes; `keep` reads no conversation again, and mixes weights in later
    tokens."""


@dataclass(frozen=True)
class TokensConfig(SettingsNode):
    """Which generated tokens are trained, and what counts once."""

    policy: TokenPolicy = "train_all"
    """`mask_older_than:N` trains tokens up to N versions old, `drop_if_older_than:N` whole such sequences,
    `fresh_tail_only` the on-policy end."""
    grammar: GrammarPolicy = "mask_forced"
    """Tokens sampled under a grammar: `mask_forced` leaves out those for which the grammar allowed no other."""
    weigh: Literal["session", "sequence"] = "session"
    """What counts once in loss, statistics and mini-batches: a `session` with all its sequences, or each `sequence`, as
    verl."""

    @property
    def older_than(self) -> int | None:
        """Versions that a trained token may be behind the trainer; None where the policy has no such bound."""
        name, _, bound = self.policy.partition(":")
        return int(bound or 0) if name.endswith("_older_than") else None


@dataclass(frozen=True)
class CorrectionConfig(SettingsNode):
    """Corrections for tokens of older weights: methods of algorithms/, beside verl's own (docs/algorithms.md)."""

    loss: Literal["auto", "dppo"] | None = "auto"
    """`dppo` sets verl's `loss_mode`, clips and `bypass_mode`; `null` leaves them; `auto`: `dppo` where they are
    verl's defaults."""
    scale_lr: bool = False
    """Scale each optimizer step's learning rate by the root of its effective sample size (VCPO)."""


@dataclass(frozen=True)
class WatchdogConfig(SettingsNode):
    """Limits of time, in seconds. What is over one is named in the log, with the chain of what waits for it."""

    transition_s: Positive = 300
    """Seconds in which a replica pauses, loads or starts, or it is given up; twice as long without tokens."""
    no_progress_s: Positive = 3600
    """Seconds without any progress until the run ends, with a report of what did not move."""
    group_s: PositiveNumber | None = None
    """Seconds without a call of an agent, in a group as old, until its session ends; `null` waits."""

    @property
    def silent_s(self) -> float:
        """Until a replica that gives no tokens, or TransferQueue that takes no rows, is over its limit."""
        return 2.0 * self.transition_s

    @property
    def long_s(self) -> float:
        """Until a commit that does not end, or an actor that does not reply, is over its limit."""
        return max(60.0, self.no_progress_s / 2)  # a machine that is busy may be late by seconds


@dataclass(frozen=True)
class CpuConfig(SettingsNode):
    """The devices of the CPU platform; read only when there is no accelerator."""

    devices: Positive | None = None
    """How many devices a CPU declares; `null` is one for each usable core. More than cores share them."""

    @property
    def device_count(self) -> int:
        """Devices to declare: as set, else one for each core that this process may use."""
        return usable_cores() if self.devices is None else self.devices

    @property
    def pin(self) -> bool:
        """Whether each device has a core of its own."""
        return self.device_count <= usable_cores()


@dataclass(frozen=True)
class GatewayConfig(SettingsNode):
    """The gateway: the APIs that users' own agents call, and the journal of their sessions."""

    enabled: bool = False
    """Serve OpenAI and Anthropic APIs for agents of your own."""
    port: NotNegative = 0
    """Where the gateway listens, also after a restart of its process; `0` is any free port."""
    journal: Text | None = None
    """The journal's file; `null` is `trajectories.sqlite` beside the checkpoints."""
    journal_gib: PositiveNumber | None = 4.0
    """GiB of a journal above which its oldest sessions that were handed over are deleted; `null` is no bound."""
    options: Annotated[tuple[str, ...], way_out("""Write it as '{key}=["--one","--two=2"]'""")] = ()
    """Options of `vllm serve` for requests, such as `["--enable-auto-tool-choice","--tool-call-parser=hermes"]`."""
    shards: Positive = 1
    """Processes that share sessions and calls; each of several has a port, from `port` on, and a journal."""
    public_address: Text | None = None
    """The host in the address that agents are given, or a whole URL; `null` is the gateway's node."""
    max_failed_groups: Annotated[PositiveNumber, way_out("Set {key}=1, or a share such as 0.5")] = 32
    """Groups of sessions that may fail in a row before the run ends; below 1, also the share of sessions of five steps
    that may fail in one way."""
    strict: bool = False
    """Refuse unknown model names, hosted tools and media with a 400, instead of taking any name and leaving them
    out."""

    @property
    def failed_in_a_row(self) -> int:
        """Groups that may fail in a row."""
        return int(self.max_failed_groups) or int(GatewayConfig.max_failed_groups)

    @property
    def failed_share(self) -> float | None:
        """The share of sessions that may fail in one way; None is no bound."""
        return self.max_failed_groups if self.max_failed_groups < 1 else None

    def journal_of(self, shard: int, folder: str) -> Path:
        """The journal's file of one shard: `trajectories.sqlite`, or `trajectories-<shard>.sqlite` of several.

        It is in `folder` unless `journal` is set.
        """
        path = Path(self.journal) if self.journal else Path(folder, JOURNAL)
        return path if self.shards == 1 else path.with_name(f"{path.stem}-{shard}{path.suffix}")


@dataclass(frozen=True)
class SamplerConfig(SettingsNode):
    """How many samples a prompt gets: one of algorithms/samplers/. It is not verl's `trainer.v1.sampler`, which draws
    from the replay buffer. An option that is null has the value of the sampler's paper."""

    name: SamplerName | None = None
    """More samples for hard prompts (`dars`), by failures (`gdro`) or information (`xrpo`), none for learned ones
    (`srpo`)."""
    success: float | None = None
    """The least reward of a right answer; `null` takes rewards as they are, from 0 to 1."""
    threshold: Annotated[float, Ge(0.01), Le(1)] | None = None
    """For `srpo`: pass rate from which a prompt is left out for good; `null` skips the next epoch."""

    @property
    def options(self) -> dict[str, Any]:
        """The options by name, None where the sampler's own value holds."""
        return {"threshold": self.threshold}


@dataclass(frozen=True)
class SeamlessConfig(SettingsNode):
    """All settings of the `seamless:` node; `resources` is None when verl's own fields describe the machines."""

    layout: Layout = Layout.AUTO
    """Generate on the trainer's devices, on `rollout.nnodes` x `n_gpus_per_node`, or on both; `auto`: as tags or
    fields imply."""
    max_staleness: NotNegative | None = None
    """Oldest weights, in versions behind the trainer, that are trained; `null`: 4 with a correction, else 1."""
    ahead: NotNegative | None = None
    """Steps whose prompts are outstanding beside the current one's; `null` adapts, from half of `max_staleness`."""
    tail_batching: Annotated[
        Annotated[float, Gt(0), Le(1)] | None, way_out("Set {key}=0.2 for a fifth more, or null")
    ] = None
    """With `max_staleness=0`: further prompts of a step, as a share; its slowest groups begin again later."""
    min_sessions: Positive | None = None
    """Sessions with something to train, without which a group is dropped; `null`: 2, or 1 with `rollout.n=1`."""
    lending: Lending = "marginal"
    """When the trainer's devices generate between its computations: where two hand-overs pay off, by verl's rule, or
    `never`."""
    handover: Handover = Handover.AUTO
    """What an engine keeps while its device trains: all, its weights, or nothing; `auto`: what memory has room for."""
    shared_prefixes: Literal["auto", "never"] = "auto"
    """Compute what sequences of a micro-batch begin with once, with the same gradients: `auto` does it where the engine
    can (dense models in Megatron's plain layers, without adapters or context parallelism), else says why not."""
    drafts: Drafts = "off"
    """`suffix`: engines draft from what they generated before, of the same prompt first, and their model verifies."""
    evaluation: Literal["inline", "beside"] = "inline"
    """Validations: training waits for each, or goes on `beside` it, whose samples may then end with newer weights."""
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    tokens: TokensConfig = field(default_factory=TokensConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    seal: Literal["sample", "full", "off"] = "sample"
    """What replicas compare with the trainer's weights, to the bit: a share of each version, or all of it."""
    restarts: NotNegative = 3
    """Times in a row that a lost replica, or an agent loop worker within ten minutes, is started again."""
    resources: Machines = None
    """The machines by their tags: groups with `name`, `count`, `devices`, `tags`, `labels`; `null`: verl's fields
    hold."""
    wait_for_machines_s: NotNegative = 0
    """Seconds to wait for `resources` that an autoscaling cluster has yet to start; `0` refuses at once."""
    device_memory_gb: Annotated[PositiveNumber | None, way_out("Set {key}=80 for 80 GB, or null")] = None
    """Memory of one device in 10^9 bytes, for the memory plan; `null`: this machine's."""
    host_memory_gb: Annotated[PositiveNumber | None, way_out("Set {key}=1000 for 1000 GB, or null")] = None
    """Memory of one machine in 10^9 bytes, for staged and offloaded weights; `null`: this machine's."""
    cpu: CpuConfig = field(default_factory=CpuConfig)
    view: Annotated[Text | None, way_out("Set {key}=127.0.0.1:0, or null")] = None
    """Serve a page that shows the run at this `host:port`; port 0 is any free one. Agents' texts are shown."""
    metrics_port: Annotated[
        Annotated[int, Ge(0), Le(LAST_PORT)] | None, way_out("Set {key}=9400, 0 for any free port, or null")
    ] = None
    """Serve metrics for Prometheus at this port of the trainer's node; `0` is any free one, `null` serves none."""

    @classmethod
    def parse(cls, node: DictConfig | Mapping[str, Any] | None) -> SeamlessConfig:
        """The node of a composed config; None, as when a config has no such node, gives the defaults.

        Raises:
            ConfigError: an unknown key, a missing value, or one of another type or out of its bounds; ConfigErrors
                where there are several.
        """
        tree = OmegaConf.to_container(node, resolve=True) if isinstance(node, DictConfig) else node
        return fields.read(cls, tree, key=NODE)

    @property
    def view_address(self) -> tuple[str, int] | None:
        """Host and port of the page that shows the run; None without it. ConfigError for a text that is no address."""
        if self.view is None:
            return None
        host, found, port = self.view.rpartition(":")
        if not found or not host or not port.isdigit() or int(port) > LAST_PORT:
            raise ConfigError(f"{NODE}.view", self.view, "is no host:port", f"Set {NODE}.view=127.0.0.1:0, or null")
        return host, int(port)

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
