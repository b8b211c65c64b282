"""What engines are started with for grammars: our scheduler, unless there is another, and parsers of the user's own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.config import tiny_run

from seamless_verl.config import SeamlessConfig
from seamless_verl.data_plane.client import plane_settings
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
    options = ["--reasoning-parser-plugin", plugin(tmp_path, "there"), "--reasoning-parser", "there"]
    config = rendering_config(serve_arguments(str(nano / "model"), options))
    assert config.structured_outputs_config.reasoning_parser == "there"


def test_a_replica_reads_a_plugin_before_its_engine_is_configured(tmp_path: Path) -> None:
    from vllm.reasoning import ReasoningParserManager

    prepared(reasoning_parser_plugin=plugin(tmp_path, "here"))
    assert ReasoningParserManager.get_reasoning_parser("here").__name__ == "Mine"


@pytest.mark.parametrize("key", ["scheduler_cls", "scheduler-cls"])
def test_a_scheduler_of_the_users_stays_and_takes_up_no_grammars(tmp_path: Path, key: str) -> None:
    theirs, ours = tiny_run(tmp_path, f"+{ENGINE}.{key}=mine.Own"), tiny_run(tmp_path)
    assert prepared(**{key: "mine.Own"}) == {key: "mine.Own"}
    assert not plane_settings(theirs, SeamlessConfig.parse(theirs.seamless), 0, "t", None).grammars_resume
    assert prepared()["scheduler_cls"] == scheduler.NAME
    assert plane_settings(ours, SeamlessConfig.parse(ours.seamless), 0, "t", None).grammars_resume


@pytest.mark.parametrize("ahead", [False, True])
def test_the_scheduler_is_of_the_kind_that_the_engine_would_have(ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    for kind in (scheduler.ContinuedGrammars, scheduler.ContinuedAsyncGrammars):
        monkeypatch.setattr(kind, "__init__", lambda self, vllm_config: None)
    config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=ahead))
    made = scheduler.scheduler(vllm_config=config)
    assert isinstance(made, scheduler.ContinuedGrammars) and isinstance(made, AsyncScheduler) is ahead
