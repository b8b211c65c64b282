"""The `seamless:` node, parsed once into frozen dataclasses.

Invariant: a parsed config holds only known keys with values of the stated types; whoever holds one
need not check again. The defaults equal those of `seamless.yaml`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf

from seamless_verl.errors import ConfigError
from seamless_verl.resources.tags import Layout, Resources

E = TypeVar("E", bound=Enum)
LENDING_POLICIES = ("marginal", "step_boundary", "never")  # of resources.lending
TOKEN_POLICIES = ("train_all", "mask_older_than", "drop_if_older_than", "fresh_tail_only")  # of trajectory.policies
JOURNAL = "trajectories.sqlite"


class Handover(str, Enum):
    """How a device that both train and generate changes hands."""

    AUTO = "auto"
    """released where verl would free the engine's cache (`rollout.free_cache_engine`), shared on the CPU platform"""
    SHARED = "shared"
    """both keep their memory: calls freeze in the engine while training computes"""
    RELEASED = "released"
    """the engine puts its memory away: calls are cut, and continued after the next weight commit"""


class KvOnUpdate(str, Enum):
    """What a weight update does to the KV cache of calls that it freezes."""

    RECOMPUTE = "recompute"
    """computed again under the new weights, so that every later token has the probability they alone give it"""
    KEEP = "keep"
    """kept: no time is lost, and later tokens are of mixed weights until their call ends"""


@dataclass(frozen=True)
class CpuConfig:
    """The CPU platform's devices."""

    devices: int | None = None
    pin: bool = True

    @property
    def device_count(self) -> int:
        """Devices to declare: as asked, else one for each core this process may use."""
        return usable_cores() if self.devices is None else self.devices


@dataclass(frozen=True)
class GatewayConfig:
    """The door for agents of the user's own. `options` are those of `vllm serve` that concern requests.

    `shards` actors share sessions and calls; `max_failed_groups` in a row without a success end the run.
    """

    enabled: bool = False
    port: int = 0
    journal: str | None = None
    options: tuple[str, ...] = ()
    shards: int = 1
    max_failed_groups: int = 32

    def journal_of(self, shard: int, folder: str) -> Path:
        """The file of one actor: `trajectories.sqlite`, or `trajectories-<shard>.sqlite` of several.

        `folder` is where it is unless `journal` says otherwise.
        """
        path = Path(self.journal) if self.journal else Path(folder, JOURNAL)
        return path if self.shards == 1 else path.with_name(f"{path.stem}-{shard}{path.suffix}")


@dataclass(frozen=True)
class WeightsConfig:
    """Weight updates: `at_once` replicas stand still together."""

    at_once: int = 1
    kv: KvOnUpdate = KvOnUpdate.RECOMPUTE


@dataclass(frozen=True)
class TokensConfig:
    """Which tokens of a batch are trained: a policy of trajectory/policies.py, and its `older_than` in versions."""

    policy: str = "train_all"
    older_than: int = 0


@dataclass(frozen=True)
class WatchdogConfig:
    """Seconds: a replica that takes longer than `transition_s` to stop, to load or to start is given up; a run that
    makes no progress for `no_progress_s` ends, and says what stood still."""

    transition_s: int = 300
    no_progress_s: int = 3600


@dataclass(frozen=True)
class SeamlessConfig:
    """Everything the `seamless:` node can say.

    `max_staleness` is in weight versions, 0 is on-policy; `ahead` in steps' worth of prompts outstanding beside one
    step's, None as many as the bound allows. `resources` None leaves the machines to verl's own fields;
    `device_memory_gb` is in 10^9 bytes.
    """

    layout: Layout = Layout.AUTO
    max_staleness: int = 1
    ahead: int | None = None
    lending: str = "marginal"
    handover: Handover = Handover.AUTO
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    tokens: TokensConfig = field(default_factory=TokensConfig)
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    cpu: CpuConfig = field(default_factory=CpuConfig)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    plot: bool = False
    resources: Resources | None = None
    device_memory_gb: float | None = None
    wait_for_machines_s: int = 0

    @classmethod
    def parse(cls, node: DictConfig | Mapping[str, Any] | None) -> SeamlessConfig:
        """The node of a composed config; None, as when a config has no such node, gives the defaults.

        Raises ConfigError for an unknown key, a missing value or a value of another type.
        """
        values = _known(node, cls, "seamless")
        cpu = _known(values.get("cpu"), CpuConfig, "seamless.cpu")
        gateway = _known(values.get("gateway"), GatewayConfig, "seamless.gateway")
        tokens = _known(values.get("tokens"), TokensConfig, "seamless.tokens")
        watchdog = _known(values.get("watchdog"), WatchdogConfig, "seamless.watchdog")
        weights = _known(values.get("weights"), WeightsConfig, "seamless.weights")
        return cls(
            layout=_one_of(Layout, "seamless.layout", values.get("layout", "auto"), "a layout"),
            max_staleness=_integer("seamless.max_staleness", values.get("max_staleness", 1), least=0),
            ahead=_optional_integer("seamless.ahead", values.get("ahead"), least=0),
            lending=_named(LENDING_POLICIES, "seamless.lending", values.get("lending", "marginal")),
            handover=_one_of(Handover, "seamless.handover", values.get("handover", "auto"), "a hand-over"),
            weights=WeightsConfig(
                at_once=_integer("seamless.weights.at_once", weights.get("at_once", 1), least=1),
                kv=_one_of(KvOnUpdate, "seamless.weights.kv", weights.get("kv", "recompute"), "a choice"),
            ),
            tokens=TokensConfig(
                policy=_named(TOKEN_POLICIES, "seamless.tokens.policy", tokens.get("policy", "train_all")),
                older_than=_integer("seamless.tokens.older_than", tokens.get("older_than", 0), least=0),
            ),
            watchdog=WatchdogConfig(
                transition_s=_integer("seamless.watchdog.transition_s", watchdog.get("transition_s", 300), least=1),
                no_progress_s=_integer("seamless.watchdog.no_progress_s", watchdog.get("no_progress_s", 3600), least=1),
            ),
            cpu=CpuConfig(
                devices=_optional_integer("seamless.cpu.devices", cpu.get("devices"), least=1),
                pin=_flag("seamless.cpu.pin", cpu.get("pin", True)),
            ),
            gateway=GatewayConfig(
                enabled=_flag("seamless.gateway.enabled", gateway.get("enabled", False)),
                port=_integer("seamless.gateway.port", gateway.get("port", 0), least=0),
                journal=_optional_text("seamless.gateway.journal", gateway.get("journal")),
                options=_texts("seamless.gateway.options", gateway.get("options", [])),
                shards=_integer("seamless.gateway.shards", gateway.get("shards", 1), least=1),
                max_failed_groups=_integer(
                    "seamless.gateway.max_failed_groups", gateway.get("max_failed_groups", 32), least=1
                ),
            ),
            plot=_flag("seamless.plot", values.get("plot", False)),
            resources=Resources.parse(values.get("resources")),
            device_memory_gb=_optional_size("seamless.device_memory_gb", values.get("device_memory_gb")),
            wait_for_machines_s=_integer("seamless.wait_for_machines_s", values.get("wait_for_machines_s", 0), least=0),
        )

    @property
    def batches_ahead(self) -> int:
        """Steps' worth of prompts that generate beyond those of the step itself."""
        return self.max_staleness if self.ahead is None else min(self.ahead, self.max_staleness)

    def layout_for(self, rollout_nodes: int, devices_per_node: int) -> Layout:
        """The layout: of the machines' tags, or else by the size of verl's standalone rollout pool."""
        if self.resources is not None:
            return self.resources.layout
        if self.layout is not Layout.AUTO:
            return self.layout
        return Layout.DISAGGREGATED if rollout_nodes * devices_per_node > 0 else Layout.COLOCATED


def usable_cores() -> int:
    """Cores this process may run on, which a container can make fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def nearest(name: str, valid: list[str], before: str = "") -> str:
    """A way out for a mistyped name: the nearest valid one when there is one, and all of them.

    Each is written with what stands `before` it in a command.
    """
    near = get_close_matches(name, valid, n=1)
    hint = f"Did you mean {before}{near[0]}? " if near else ""
    return f"{hint}Valid: {', '.join(before + one for one in valid)}"


def _known(node: object, cls: type[Any], prefix: str) -> dict[str, Any]:
    tree = OmegaConf.to_container(node, resolve=True) if isinstance(node, DictConfig) else node
    if tree is None:
        return {}
    valid = [f.name for f in fields(cls)]
    if not isinstance(tree, Mapping):
        raise ConfigError(prefix, tree, "must be a node with keys", nearest("", valid))
    for name, value in tree.items():
        if name not in valid:
            raise ConfigError(f"{prefix}.{name}", value, "is not a known key", nearest(str(name), valid, f"{prefix}."))
    return dict(tree)


def _one_of(kind: type[E], key: str, value: object, what: str) -> E:
    valid = [str(member.value) for member in kind]
    if value not in valid:
        raise ConfigError(key, value, f"is not {what}", nearest(str(value), valid))
    return kind(value)


def _named(names: Sequence[str], key: str, value: object) -> str:
    if not isinstance(value, str) or value not in names:
        raise ConfigError(key, value, "is not known", nearest(str(value), list(names)))
    return value


def _integer(key: str, value: object, *, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(key, value, f"must be a whole number of at least {least}", f"Set {key}={least} or more")
    return value


def _optional_size(key: str, value: object) -> float | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0):
        raise ConfigError(key, value, "must be a number above 0", f"Set {key}=80 for 80 GB, or null")
    return None if value is None else float(value)


def _optional_integer(key: str, value: object, *, least: int) -> int | None:
    return None if value is None else _integer(key, value, least=least)


def _flag(key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(key, value, "must be true or false", f"Set {key}=true or {key}=false")
    return value


def _optional_text(key: str, value: object) -> str | None:
    if value is not None and (not isinstance(value, str) or not value):
        raise ConfigError(key, value, "must be a text", f"Set {key} to one, or to null")
    return value


def _texts(key: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
        raise ConfigError(key, value, "must be a list of texts", f'Write it as \'{key}=["--one","--two=2"]\'')
    return tuple(value)
