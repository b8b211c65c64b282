"""What follows from the `seamless:` node is set in verl's fields, unless the user set these."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf
from support.config import refused, tiny_run

from seamless_verl.config.adopting import adopt_parsers

ENGINE = "actor_rollout_ref.rollout.engine_kwargs.vllm"
INNER = f"{ENGINE}.structured_outputs_config.reasoning_parser"
ON = ("trainer.v1.trainer_mode=seamless", "seamless.gateway.enabled=true")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((*ON, 'seamless.gateway.options=["--reasoning-parser=qwen3"]'), "qwen3"),
        ((*ON, 'seamless.gateway.options=["--reasoning-parser","qwen3"]'), "qwen3"),
        ((*ON, 'seamless.gateway.options=["--reasoning_parser=qwen3"]', f"+{ENGINE}.reasoning_parser=qwen3"), "qwen3"),
        ((*ON, 'seamless.gateway.options=["--reasoning_parser=qwen3"]', f"+{INNER}=qwen3"), None),
        ((*ON, 'seamless.gateway.options=["--tool-call-parser=hermes"]'), None),
        (('seamless.gateway.options=["--reasoning-parser=qwen3"]',), None),
    ],
)
def test_engines_read_reasoning_as_the_gateway_does(
    tmp_path: Path, overrides: tuple[str, ...], expected: str | None
) -> None:
    config = tiny_run(tmp_path, "trainer.device=cpu", *overrides)
    adopt_parsers(config)
    assert OmegaConf.select(config, f"{ENGINE}.reasoning_parser") == expected


@pytest.mark.parametrize("key", [f"{ENGINE}.reasoning_parser", f"{ENGINE}.reasoning-parser", INNER])
def test_engines_that_read_it_otherwise_are_refused(tmp_path: Path, key: str) -> None:
    options = 'seamless.gateway.options=["--reasoning-parser=qwen3"]'
    config = tiny_run(tmp_path, "trainer.device=cpu", *ON, options, f"+{key}=glm45")
    (problem,) = refused(config)
    assert (problem.value, problem.reason.split(",")[0]) == ("--reasoning-parser=qwen3", "engines have glm45")
