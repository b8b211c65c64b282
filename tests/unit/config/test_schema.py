"""The `seamless:` node: its defaults, what it refuses, and what follows from it."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from omegaconf import OmegaConf
from support.config import compose_ours

from seamless_verl.config import CpuConfig, GatewayConfig, Layout, SeamlessConfig, usable_cores
from seamless_verl.config.schema import (
    CorrectionConfig,
    GrammarPolicy,
    Handover,
    KvOnUpdate,
    Lending,
    TokensConfig,
    WatchdogConfig,
    WeightsConfig,
)
from seamless_verl.errors import ConfigError, ConfigErrors
from seamless_verl.resources import lending
from seamless_verl.trajectory.policies import POLICIES, GrammarTokens


def test_each_shard_has_a_journal() -> None:
    one, two = GatewayConfig(), GatewayConfig(shards=2, journal="a/b.db")
    assert one.journal_of(0, "folder") == Path("folder/trajectories.sqlite")
    assert [two.journal_of(shard, "folder") for shard in (0, 1)] == [Path("a/b-0.db"), Path("a/b-1.db")]
    assert GatewayConfig(shards=2).journal_of(1, "folder") == Path("folder/trajectories-1.sqlite")


def test_yaml_and_dataclass_have_the_same_defaults() -> None:
    assert SeamlessConfig.parse(compose_ours().seamless) == SeamlessConfig() == SeamlessConfig.parse(None)


def test_the_policies_are_those_there_are() -> None:
    for policy in POLICIES:
        assert SeamlessConfig.parse({"tokens": {"policy": policy}}).tokens.policy == policy
    assert set(get_args(GrammarPolicy)) == set(GrammarTokens)
    assert set(get_args(Lending)) == set(lending.POLICIES)


def test_values_are_read() -> None:
    gateway = {"enabled": True, "port": 8000, "journal": "j.sqlite", "options": ["--tool-call-parser=hermes"]}
    gateway |= {"shards": 2, "max_failed_groups": 5, "journal_gib": 1}
    node = {"layout": "disaggregated", "max_staleness": 0, "cpu": {"devices": 3}}
    kept = {"journal_gib": 1.0}
    options = ("--tool-call-parser=hermes",)
    parsed_gateway = GatewayConfig(True, 8000, "j.sqlite", options=options, shards=2, max_failed_groups=5, **kept)
    node |= {"gateway": gateway, "handover": "resident", "weights": {"kv": "keep"}}
    node["watchdog"] = {"transition_s": 5, "no_progress_s": 60}
    node["tokens"] = {"policy": "mask_older_than:2"}
    node["correction"] = {"loss": "dppo", "scale_lr": True}
    watchdog, correction = WatchdogConfig(5, 60), CorrectionConfig("dppo", True)
    weights, tokens = WeightsConfig(KvOnUpdate.KEEP), TokensConfig("mask_older_than:2")
    node |= {"ahead": 0, "lending": "never", "min_sessions": 3, "restarts": 5}
    node |= {"tail_batching": 0.5}
    first = (Layout.DISAGGREGATED, 0, 0, 0.5, 3, "never", Handover.RESIDENT)
    named = {"weights": weights, "tokens": tokens, "correction": correction, "watchdog": watchdog}
    named |= {"cpu": CpuConfig(3), "gateway": parsed_gateway, "restarts": 5}
    assert (parsed_gateway.failed_in_a_row, parsed_gateway.failed_share) == (5, None)
    shared = replace(parsed_gateway, max_failed_groups=0.4)
    assert (shared.failed_in_a_row, shared.failed_share) == (32, 0.4)
    parsed = SeamlessConfig(*first, **named)
    assert SeamlessConfig.parse(node) == SeamlessConfig.parse(OmegaConf.create(node)) == parsed
    assert pickle.loads(pickle.dumps(parsed)) == parsed


def test_machines_are_read() -> None:
    group = {"name": "a", "count": 2, "devices": 4, "tags": ["train", "rollout"], "labels": {"zone": "b"}}
    parsed = SeamlessConfig.parse(OmegaConf.create({"resources": [group], "device_memory_gb": 80}))
    assert parsed.resources is not None and parsed.device_memory_gb == 80.0
    assert parsed.resources.groups[0].labels == (("zone", "b"),)
    assert parsed.layout_for(1, 8) is Layout.COLOCATED  # the tags decide, not verl's pool
    assert SeamlessConfig.parse({"layout": "multiplexed"}).layout_for(0, 0) is Layout.MULTIPLEXED
    assert pickle.loads(pickle.dumps(parsed)) == parsed


def test_all_mistakes_are_refused_at_once() -> None:
    node = {"max_staleness": -1, "cpu": {"pin": 1, "devices": 0}, "resources": [{"count": 0}], "handovers": "auto"}
    with pytest.raises(ConfigErrors) as caught:
        SeamlessConfig.parse(OmegaConf.create(node))
    keys = ["handovers", "cpu.pin", "max_staleness"]
    keys += [*(f"resources[0].{name}" for name in ("count", "devices", "tags")), "cpu.devices"]
    assert [mistake.key for mistake in caught.value.mistakes] == [f"seamless.{key}" for key in keys]
    assert len(str(caught.value).splitlines()) == len(keys)


@pytest.mark.parametrize(
    ("node", "key", "way_out"),
    [
        ({"layuot": "auto"}, "seamless.layuot", "Did you mean seamless.layout?"),
        ({"cpu": {"device": 2}}, "seamless.cpu.device", "Did you mean seamless.cpu.devices?"),
        ({"foo": 1}, "seamless.foo", "Valid: seamless.layout, seamless.max_staleness, "),
        ({"layout": "colocate"}, "seamless.layout", "Did you mean colocated?"),
        ({"layout": ["auto"]}, "seamless.layout", "Did you mean auto?"),
        ({"layout": "any"}, "seamless.layout", "Valid: auto, colocated, disaggregated, multiplexed"),
        ({"max_staleness": -1}, "seamless.max_staleness", "Set seamless.max_staleness=0"),
        ({"max_staleness": True}, "seamless.max_staleness", "Set seamless.max_staleness=0"),
        ({"max_staleness": "???"}, "seamless.max_staleness", "Set seamless.max_staleness=0"),
        ({"cpu": {"devices": 0}}, "seamless.cpu.devices", "Set seamless.cpu.devices=1"),
        ({"cpu": 2}, "seamless.cpu", "Valid: devices"),
        ({"handover": "residents"}, "seamless.handover", "Did you mean resident?"),
        ({"weights": {"kv": "drop"}}, "seamless.weights.kv", "Valid: recompute, keep"),
        ({"tokens": {"policy": "mask_older"}}, "seamless.tokens.policy", "mask_older_than:1"),
        ({"tokens": {"policy": "train_all:1"}}, "seamless.tokens.policy", "mask_older_than:1"),
        ({"watchdog": {"no_progress_s": 0}}, "seamless.watchdog.no_progress_s", "no_progress_s=1"),
        ({"lending": "sometimes"}, "seamless.lending", "marginal"),
        ({"ahead": -1}, "seamless.ahead", "Set seamless.ahead=0"),
        ({"gateway": {"enabled": 1}}, "seamless.gateway.enabled", "Set seamless.gateway.enabled=true"),
        ({"gateway": {"port": "any"}}, "seamless.gateway.port", "Set seamless.gateway.port=0"),
        ({"resources": {"train": 1}}, "seamless.resources", "Write it as seamless.resources=[{count"),
        ({"resources": [{"count": 1, "device": 1}]}, "seamless.resources[0].device", "Did you mean devices?"),
        ({"device_memory_gb": 0}, "seamless.device_memory_gb", "Set seamless.device_memory_gb=80"),
        ({"device_memory_gb": "80"}, "seamless.device_memory_gb", "or null"),
        ({"wait_for_machines_s": -1}, "seamless.wait_for_machines_s", "Set seamless.wait_for_machines_s=0"),
        ({"gateway": {"journal": 3}}, "seamless.gateway.journal", "null"),
        ({"gateway": {"shards": 0}}, "seamless.gateway.shards", "Set seamless.gateway.shards=1"),
        ({"gateway": {"max_failed_groups": 0}}, "seamless.gateway.max_failed_groups", "max_failed_groups=1"),
        ({"gateway": {"options": "--a"}}, "seamless.gateway.options", 'options=["--one","--two=2"]'),
    ],
)
def test_refused(node: dict[str, Any], key: str, way_out: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SeamlessConfig.parse(node)
    assert caught.value.key == key
    assert way_out in caught.value.way_out


@pytest.mark.parametrize(
    ("asked", "pool", "layout"),
    [
        (Layout.AUTO, (0, 8), Layout.COLOCATED),
        (Layout.AUTO, (1, 0), Layout.COLOCATED),
        (Layout.AUTO, (1, 2), Layout.DISAGGREGATED),
        (Layout.COLOCATED, (1, 2), Layout.COLOCATED),
        (Layout.DISAGGREGATED, (0, 0), Layout.DISAGGREGATED),
    ],
)
def test_layout(asked: Layout, pool: tuple[int, int], layout: Layout) -> None:
    assert SeamlessConfig(layout=asked).layout_for(*pool) is layout


def test_devices_default_to_usable_cores() -> None:
    assert CpuConfig().device_count == usable_cores() >= 1
    assert CpuConfig(devices=5).device_count == 5
