"""What follows from the `seamless:` node is set in verl's fields, unless the user set these."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf
from support.config import TINY, compose_ours, refused, tiny_run

from seamless_verl.config.adopting import DPPO, adopt_loss, adopt_parsers
from seamless_verl.config.checks import preflight

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


LOSS = ("trainer.v1.trainer_mode=seamless", "seamless.correction.loss=dppo")
CLIP = "actor_rollout_ref.actor.clip_ratio_high"


def test_a_loss_is_set_where_verl_has_its_defaults(tmp_path: Path) -> None:
    config = compose_ours(*TINY, *LOSS)
    assert {key: OmegaConf.select(config, key) for key in DPPO} == {key: verls for key, (verls, _) in DPPO.items()}
    adopt_loss(config)
    assert {key: OmegaConf.select(config, key) for key in DPPO} == {key: value for key, (_, value) in DPPO.items()}
    tiny = tiny_run(tmp_path, *LOSS, "seamless.max_staleness=4")
    adopt_loss(tiny)
    assert preflight(tiny, devices=1, accelerator=False) == []


def test_what_the_user_set_of_a_loss_stays(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, *LOSS, f"{CLIP}=0.3", "actor_rollout_ref.actor.clip_ratio=0.2")
    adopt_loss(config, ["actor_rollout_ref.actor.clip_ratio=0.2"])
    actor = config.actor_rollout_ref.actor
    assert (actor.clip_ratio, actor.clip_ratio_low, actor.clip_ratio_high) == (0.2, 0.15, 0.3)


def test_another_loss_beside_it_is_refused(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, *LOSS, "actor_rollout_ref.actor.policy_loss.loss_mode=m2po")
    adopt_loss(config)
    (problem,) = refused(config)
    assert problem.key == "seamless.correction.loss" and "loss_mode=m2po" in problem.reason


def test_verls_trainers_keep_their_loss(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, "trainer.v1.trainer_mode=sync", "seamless.correction.loss=dppo")
    before = OmegaConf.to_container(config)
    adopt_loss(config)
    assert OmegaConf.to_container(config) == before
    preflight(config, devices=1, accelerator=False)
