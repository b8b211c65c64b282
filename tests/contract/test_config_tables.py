"""The tables of the config checks are what the installed hosts say."""

from __future__ import annotations

import ast
import inspect
import re
from importlib.metadata import version

import pytest
from packaging.version import Version

from seamless_verl.config.checks.corrections import OWN_LOSSES
from seamless_verl.config.checks.estimators import OWN_ESTIMATORS
from seamless_verl.config.checks.hosts import (
    ADVANTAGES,
    DERIVED_HEAD_DIM,
    LOGGERS,
    MBRIDGE_MODEL_TYPES,
    POLICY_LOSSES,
    VERIFIED_CPU,
    VLLM_CPU_HEAD_SIZES,
    installed,
)
from seamless_verl.config.checks.modes import VERL_MODES
from seamless_verl.config.checks.serve_options import (
    ALSO_READ,
    PARSERS,
    UNREAD,
    _keys,
    _source,
    engine_options,
    serve_options,
    server_options,
)
from seamless_verl.config.checks.tools import KIND, TOOL_PARSERS
from seamless_verl.config.checks.values import ENGINE_DTYPES, LOSS_AGGREGATIONS
from seamless_verl.config.composing import verl_config_dir


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_mbridge_model_types() -> None:
    from mbridge import AutoBridge

    assert version("mbridge") == "0.15.1"
    assert sorted(AutoBridge.list_supported_models()) == sorted(MBRIDGE_MODEL_TYPES)


@pytest.mark.integration
def test_vllm_cpu_head_sizes() -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert tuple(CPUAttentionBackend.get_supported_head_sizes()) == VLLM_CPU_HEAD_SIZES
    assert CPUAttentionBackend.supports_head_size(32) and not CPUAttentionBackend.supports_head_size(16)


@pytest.mark.integration
def test_what_verl_finds_by_name() -> None:
    import inspect

    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
    from verl.utils import tracking
    from verl.utils.tracking import Tracking

    from seamless_verl import algorithms

    algorithms.register(algorithms.LOSSES | algorithms.ESTIMATORS)
    assert algorithms.LOSSES.keys() == set(OWN_LOSSES) and algorithms.ESTIMATORS.keys() == set(OWN_ESTIMATORS)
    assert sorted(ADV_ESTIMATOR_REGISTRY) == sorted((*ADVANTAGES, *OWN_ESTIMATORS))
    assert sorted(POLICY_LOSS_REGISTRY) == sorted((*POLICY_LOSSES, *OWN_LOSSES))
    assert {*Tracking.supported_backend, "tracking"} == set(LOGGERS)
    source = inspect.getsource(tracking)
    imported = {one for one in LOGGERS.values() if one is not None and one != "tensorboard"}  # which torch imports
    assert all(re.search(rf"^ +import {module}\b", source, re.MULTILINE) for module in imported)
    assert "import SummaryWriter" in source


@pytest.mark.integration
def test_vllm_serve_options() -> None:
    """Read from the source, they are the parser's own; so are the names of tool and reasoning parsers."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    from seamless_verl.platform.vllm_versions import serve_parser

    parser = serve_parser()
    actions = parser._actions
    flags = {flag.removeprefix("--") for one in actions for flag in one.option_strings if flag.startswith("--")}
    assert {
        flag for flag in flags if flag.removeprefix("no-") not in flags or not flag.startswith("no-")
    } == serve_options()
    groups = {
        group.title: {flag.removeprefix("--") for one in group._group_actions for flag in one.option_strings}
        for group in parser._action_groups
    }
    for title in ("CacheConfig", "LoadConfig", "ParallelConfig", "SchedulerConfig", "VllmConfig"):
        assert {name for name in groups[title] if name in serve_options()} - {ALSO_READ} <= engine_options()
    for title in ("MultiModalConfig", "StructuredOutputsConfig"):
        assert not groups[title] & engine_options()
    assert groups["ModelConfig"] & engine_options() == UNREAD
    assert {"host", "port", "api-key", "ssl-keyfile", "root-path"} <= server_options() <= groups["Frontend"]
    assert not {"chat-template", "tool-call-parser", "enable-auto-tool-choice"} & server_options()
    for name, manager in [("tool-call-parser", ToolParserManager), ("reasoning-parser", ReasoningParserManager)]:
        place, table, plugin = PARSERS[name]
        file = _source(place)
        assert file is not None and plugin in flags
        assert sorted(_keys(file, table)) == sorted(manager.list_registered())


@pytest.mark.integration
@pytest.mark.parametrize("kind", DERIVED_HEAD_DIM)
def test_head_dim_is_derived(kind: str) -> None:
    """transformers gives these types no head size of their own when config.json has none."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(kind, hidden_size=96, num_attention_heads=2, num_key_value_heads=2)
    assert (getattr(config, "head_dim", None) or 48) == 48


def test_verl_tool_parsers() -> None:
    """Every parser that verl registers, and the class of tools, read from their sources."""
    folder = verl_config_dir().parents[1]
    source = (folder / "experimental" / "agent_loop" / "tool_parser.py").read_text()
    assert sorted(re.findall(r'@ToolParser\.register\("(.+)"\)', source)) == sorted(TOOL_PARSERS)
    assert "class BaseTool:" in (folder / "tools" / "base_tool.py").read_text()
    kinds = (folder / "tools" / "tool_registry.py").read_text().partition("class ToolType(Enum):")[2]
    assert re.findall(r"^    [A-Z]+ = (.+)$", kinds, re.MULTILINE) == [f'"{KIND}"']


def test_verl_modes() -> None:
    """Every trainer that verl 0.9.1 registers, read from its source without importing it."""
    folder = verl_config_dir().parent / "ppo" / "v1"
    names = [
        call.args[0].value
        for file in folder.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef)
        for call in node.decorator_list
        if isinstance(call, ast.Call) and getattr(call.func, "id", None) == "register_trainer"
        if isinstance(call.args[0], ast.Constant)
    ]
    assert sorted(names) == sorted(VERL_MODES)


def test_installed_versions_were_verified() -> None:
    for name, verified in VERIFIED_CPU.items():
        found = installed(verified)
        assert found is not None, name
        assert verified.newest is not None
        release = Version(Version(found).public)
        assert Version(verified.oldest) <= release <= Version(verified.newest), (name, found)


def test_the_names_of_platforms() -> None:
    from verl.plugin.platform.platform_manager import PlatformRegistry

    from seamless_verl.config.checks.hosts import PLATFORMS

    assert {*PlatformRegistry.registered_names(), "cpu"} == set(PLATFORMS)


def test_the_choices_of_a_check_are_those_of_verl_and_vllm() -> None:
    from typing import get_args

    from verl.workers.config.actor import ActorConfig
    from vllm.config.model import ModelDType

    source = inspect.getsource(ActorConfig.__post_init__)
    listed = source[source.index("valid_loss_agg_modes = [") : source.index("if self.loss_agg_mode")]
    assert tuple(re.findall(r'"([\w-]+)"', listed)) == LOSS_AGGREGATIONS
    assert get_args(ModelDType) == ENGINE_DTYPES
