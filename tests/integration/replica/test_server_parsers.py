"""The engine settings for grammars: our scheduler unless the user set one, and the user's reasoning parsers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.config import tiny_run

from seamless_verl.config import SeamlessConfig
from seamless_verl.data_plane.client import plane_settings
from seamless_verl.errors import ConfigError
from seamless_verl.gateway.server import rendering_config, serve_arguments
from seamless_verl.platform.adaptation import plain_class
from seamless_verl.replica import scheduler
from seamless_verl.replica.server import SeamlessServer

pytestmark = pytest.mark.integration
PLUGIN = """
from vllm.reasoning import ReasoningParserManager
from vllm.reasoning.deepseek_r1_reasoning_parser import DeepSeekR1ReasoningParser

@ReasoningParserManager.register_module("{name}")
class Mine(DeepSeekR1ReasoningParser):
    pass
"""
ENGINE = "actor_rollout_ref.rollout.engine_kwargs.vllm"


def plugin(folder: Path, name: str) -> str:
    (folder / "plugin.py").write_text(PLUGIN.format(name=name))
    return str(folder / "plugin.py")


def prepared(**given: Any) -> dict[str, Any]:
    server = object.__new__(plain_class(SeamlessServer))
    server.config = SimpleNamespace()
    server._preprocess_engine_kwargs(given)
    return given


def test_the_gateway_reads_a_plugin(nano: Path, tmp_path: Path) -> None:
    options = ["--reasoning-parser-plugin", plugin(tmp_path, "plugged_in"), "--reasoning-parser", "plugged_in"]
    config = rendering_config(serve_arguments(str(nano / "model"), options))
    assert config.structured_outputs_config.reasoning_parser == "plugged_in"


def test_an_option_that_vllm_does_not_know_is_named_and_not_those_of_the_run(nano: Path) -> None:
    with pytest.raises(ConfigError, match=r"options=\['--no-such=x'\]: unrecognized arguments: --no-such=x\. `vllm"):
        serve_arguments(str(nano / "model"), ["--max-model-len=64", "--served-model-name", "policy", "--no-such=x"])


def test_a_replica_reads_a_plugin_before_its_engine_is_configured(tmp_path: Path) -> None:
    from vllm.reasoning import ReasoningParserManager

    prepared(reasoning_parser_plugin=plugin(tmp_path, "plugged_in_too"))
    assert ReasoningParserManager.get_reasoning_parser("plugged_in_too").__name__ == "Mine"


@pytest.mark.parametrize("key", ["scheduler_cls", "scheduler-cls"])
def test_a_scheduler_of_the_users_stays_and_resumes_no_grammars(tmp_path: Path, key: str) -> None:
    custom, default = tiny_run(tmp_path, f"+{ENGINE}.{key}=mine.Own"), tiny_run(tmp_path)
    assert prepared(**{key: "mine.Own"}) == {key: "mine.Own"}
    assert not plane_settings(custom, SeamlessConfig.parse(custom.seamless), 0, "t", None).grammars_resume
    assert prepared()["scheduler_cls"] == scheduler.SCHEDULER_CLS
    assert plane_settings(default, SeamlessConfig.parse(default.seamless), 0, "t", None).grammars_resume


@pytest.mark.parametrize("is_async", [False, True])
def test_the_scheduler_is_of_the_kind_that_the_engine_would_have(
    is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    for scheduler_class in (scheduler.GrammarScheduler, scheduler.AsyncGrammarScheduler):
        monkeypatch.setattr(scheduler_class, "__init__", lambda self, vllm_config: None)
    config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=is_async))
    made = scheduler.make_scheduler(vllm_config=config)
    assert isinstance(made, scheduler.GrammarScheduler) and isinstance(made, AsyncScheduler) is is_async


def test_an_own_scheduler_beside_a_store_of_kv_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"scheduler_cls='mine.Scheduler': would find KV of old weights"):
        prepared(scheduler_cls="mine.Scheduler", kv_offloading_size=1)
