"""Agent loops are made as verl makes them: by hydra, of an entry in the file of agent loops."""

from __future__ import annotations

from typing import Any

import hydra
import pytest
from omegaconf import OmegaConf
from support.config import compose_ours

from seamless_verl.agents.limits import CommandLimits
from seamless_verl.agents.settings import SamplingDefaults, SessionQuota
from seamless_verl.tiny import make_tokenizer

pytestmark = pytest.mark.integration
LOOPS = "seamless_verl.agent_loops.loops"


def make_loop(entry: dict[str, Any]) -> Any:
    from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap

    config = compose_ours("actor_rollout_ref.rollout.name=vllm")
    return hydra.utils.instantiate(
        config=OmegaConf.create(entry),
        trainer_config=DictConfigWrap(config=config),
        server_manager=None,
        tokenizer=make_tokenizer(),
        processor=None,
        hf_model_type="qwen3",
        dataset_cls=object,
        data_config=DictConfigWrap(config=config.data),
        tools=ToolListWrap([]),
    )


def test_a_command_loop_has_what_its_entry_says() -> None:
    entry = {"name": "shell", "_target_": f"{LOOPS}.CommandAgentLoop", "command": ["sleep", 1], "env": {"A": "1"}}
    entry |= {"session": {"max_turns": 3}, "sampling": {"seed": 7}, "limits": {"cpu_s": 3}, "time_limit_s": 60}
    loop = make_loop(entry)
    assert loop.settings.session == SessionQuota(max_turns=3)
    assert loop.settings.sampling == SamplingDefaults(seed=7) and loop.settings.failure_reward == 0.0
    assert (loop.command.command, loop.command.env) == (["sleep", "1"], {"A": "1"})
    assert loop.command.limits == CommandLimits(wall_s=60, cpu_s=3)


def test_a_callable_loop_has_its_agent() -> None:
    loop = make_loop({"name": "mine", "_target_": f"{LOOPS}.CallableAgentLoop", "agent": "operator:add"})
    assert loop.agent(1, 2) == 3 and loop.settings.time_limit_s == 600


def test_an_entry_that_cannot_work_is_refused() -> None:
    entry = {"name": "mine", "_target_": f"{LOOPS}.CallableAgentLoop", "agent": "operator:add"}
    with pytest.raises(hydra.errors.InstantiationException) as caught:
        make_loop(entry | {"session": {"max_turns": 0}})
    assert str(caught.value.__cause__).startswith("mine.session.max_turns=0: must be a whole number of at least 1")
