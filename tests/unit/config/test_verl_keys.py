"""The engine that our config chose is said where the command line names none."""

from __future__ import annotations

import pytest

from seamless_verl.config.verl_keys import chosen_engine

ACTOR = "actor_rollout_ref.actor"


@pytest.mark.parametrize("override", ["trainer.nnodes=2", f"{ACTOR}.optim.lr=1e-6", f"+{ACTOR}.mine=1"])
def test_said(override: str) -> None:
    chosen = chosen_engine("megatron", [override])
    assert chosen == "chosen: model_engine=megatron (verl's default is dp; docs/migrating.md)"


@pytest.mark.parametrize(
    "override",
    [
        "model_engine=megatron",
        f"{ACTOR}.strategy=megatron",
        f"actor@{ACTOR}=megatron_actor",
        f"{ACTOR}.megatron.tensor_model_parallel_size=2",
        f"+{ACTOR}.megatron.override_transformer_config.apply_rope_fusion=True",
        f"{ACTOR}.optim.lr_decay_style=constant",
    ],
)
def test_not_said_where_it_is_named(override: str) -> None:
    assert chosen_engine("megatron", ["trainer.nnodes=2", override]) is None


def test_verls_default_is_not_said() -> None:
    assert chosen_engine("dp", []) is None
