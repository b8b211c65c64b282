"""The training engine: one choice of it, and on the CPU platform no kernels that only accelerators run."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.config import assert_refused, tiny_plain

from seamless_verl.config import preflight
from seamless_verl.config.checks.engines import FSDP, KERNELS, STRATEGY
from seamless_verl.config.checks.hosts import VERIFIED_CPU

ACTOR = "actor_rollout_ref.actor"
OPTIONS = "megatron.override_transformer_config"


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_of_accelerators(tmp_path: Path, name: str) -> None:
    key = f"{ACTOR}.{OPTIONS}.{name}"
    assert_refused(tiny_plain(tmp_path, f"{key}=true"), key, True, "Leave it out on the CPU platform")
    assert preflight(tiny_plain(tmp_path, f"{key}=false"), devices=1, accelerator=False) == []


def test_kernels_of_models_that_the_run_lacks(tmp_path: Path) -> None:
    unused = [f"{node}.{OPTIONS}.apply_rope_fusion=true" for node in ("actor_rollout_ref.ref", "critic")]
    assert preflight(tiny_plain(tmp_path, *unused), devices=1, accelerator=False) == []
    key = unused[0].partition("=")[0]
    assert_refused(tiny_plain(tmp_path, *unused, f"{ACTOR}.use_kl_loss=true"), key, True, "Leave it out")


def test_the_cpu_platform_trains_with_megatron(tmp_path: Path) -> None:
    assert_refused(tiny_plain(tmp_path, f"{STRATEGY}=fsdp2"), STRATEGY, "fsdp2", "with model_engine=megatron")


def test_a_strategy_of_another_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seamless_verl.config.checks.hosts.VERIFIED_CUDA", VERIFIED_CPU)  # what is installed here
    monkeypatch.setattr("seamless_verl.config.checks.model.find_spec", lambda name: name)  # Transformer Engine is
    gpus = {"devices": None, "accelerator": True}
    assert_refused(tiny_plain(tmp_path, f"{STRATEGY}=fsdp2"), STRATEGY, "fsdp2", "Add model_engine=dp", **gpus)
    kind = f"{ACTOR}._target_={FSDP}"
    assert_refused(tiny_plain(tmp_path, kind), STRATEGY, "megatron", "Set model_engine=megatron", **gpus)
    assert preflight(tiny_plain(tmp_path, kind, f"{STRATEGY}=fsdp2"), **gpus) == []
