"""Megatron on the host: verl's own engine under every kind of parallelism, against transformers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.megatron_runs import correlation, logprobs_of, losses, made, measured_logprobs, reference, run
from support.paths import child_environment

pytestmark = [pytest.mark.integration, pytest.mark.slowest(3)]
LAYOUTS: dict[str, dict[str, int]] = {
    "one": {},
    "tp2": {"world": 2, "tp": 2},
    "pp2": {"world": 2, "pp": 2},
    "dp2": {"world": 2},
    "tp2_megatron_bridge": {"world": 2, "tp": 2, "megatron_bridge": True},
}


def reference_logprobs(model: Path, weights: dict[str, torch.Tensor] | None) -> list[torch.Tensor]:
    """transformers in fp32 on the weights rounded to bf16."""
    expected = reference(model)
    if weights is not None:
        missing = expected.load_state_dict({k: v.float() for k, v in weights.items()}, strict=False).missing_keys
        assert set(missing) <= {"lm_head.weight"}
    return logprobs_of(expected)


@pytest.fixture(scope="module")
def runs(
    environ: dict[str, str], nano: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    """Four updates in every layout, and a checkpoint after the second (`checkpoint_of`)."""
    base = tmp_path_factory.getbasetemp()
    more = {"updates": 4, "save_before_update": 2}
    return {name: run(environ, made(base / name), nano / "model", **LAYOUTS[name], **more) for name in LAYOUTS}


def checkpoint_of(factory: pytest.TempPathFactory, layout: str) -> Path:
    return factory.getbasetemp() / layout / "checkpoint"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logprobs_agree_with_transformers_before_and_after_updates(
    runs: dict[str, list[dict[str, Any]]], nano: Path, layout: str
) -> None:
    results = runs[layout]
    for step, weights in ((0, None), (-1, results[0]["weights"])):
        expected = torch.cat(reference_logprobs(nano / "model", weights))
        measured = torch.cat(measured_logprobs(results, step))
        assert (measured - expected).abs().max() < 2e-2
        assert correlation(measured, expected) > 0.9999


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_learns_alike(runs: dict[str, list[dict[str, Any]]], layout: str) -> None:
    one, other = losses(runs["one"]), losses(runs[layout])
    assert other[-1] < other[0] - 0.5
    assert torch.allclose(one, other, atol=1e-2), (one, other)


def test_export_without_updates_is_the_model_bit_for_bit(environ: dict[str, str], nano: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    exported = run(environ, tmp_path, nano / "model", updates=0)[0]["weights"]
    original = load_file(nano / "model" / "model.safetensors")
    for name, tensor in exported.items():
        assert torch.equal(tensor, original[name].to(torch.bfloat16)), name


def test_both_bridges_train_and_export_the_same_bit_for_bit(runs: dict[str, list[dict[str, Any]]]) -> None:
    one, other = runs["tp2"][0], runs["tp2_megatron_bridge"][0]
    assert one["losses"] == other["losses"] and one["weights"].keys() == other["weights"].keys()
    assert all(torch.equal(weight, other["weights"][name]) for name, weight in one["weights"].items())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_engine_goes_on_bit_for_bit(
    environ: dict[str, str], runs: dict[str, list[dict[str, Any]]], nano: Path, tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory, layout: str,
) -> None:  # fmt: skip
    checkpoint = checkpoint_of(tmp_path_factory, layout)
    resumed = run(environ, tmp_path, nano / "model", **LAYOUTS[layout], updates=2, load=str(checkpoint))
    for before, after in zip(runs[layout], resumed, strict=True):
        assert (before["losses"][2:], before["rates"][2:]) == (after["losses"], after["rates"])
        for name, tensor in before["weights"].items():
            assert torch.equal(tensor, after["weights"][name]), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_saved_hf_model_has_the_logprobs_of_the_trainer(
    runs: dict[str, list[dict[str, Any]]], tmp_path_factory: pytest.TempPathFactory, layout: str
) -> None:
    expected = torch.cat(reference_logprobs(checkpoint_of(tmp_path_factory, layout) / "model" / "huggingface", None))
    measured = torch.cat(measured_logprobs(runs[layout], step=2))
    assert (measured - expected).abs().max() < 2e-2
    assert (measured - torch.cat(measured_logprobs(runs[layout], step=0))).abs().max() > 0.1  # it was trained


def test_an_engine_of_the_host_sees_to_its_products_of_bf16(runs: dict[str, list[dict[str, Any]]]) -> None:
    assert {result["fast_products"] for results in runs.values() for result in results} == {1}


WITHOUT_TE = """
import sys
import torch
from verl.workers.engine import EngineRegistry
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead
from seamless_verl.platform.engine_without_te import register_engines

def engine():
    return EngineRegistry.get_engine_cls("language_model", "megatron")

assert engine() is MegatronEngineWithLMHead
register_engines()
register_engines()
assert engine().__name__ == "TorchMegatronEngine" and issubclass(engine(), MegatronEngineWithLMHead)
import megatron.core.models.gpt.gpt_layer_specs as specs
from megatron.core.transformer.module import MegatronModule
from seamless_verl.platform.megatron.layers import use_torch_layers
cuda, pinned = MegatronModule.cuda, torch.Tensor.pin_memory
use_torch_layers()
assert specs.get_gpt_layer_with_transformer_engine_spec().submodules.self_attention is not None
from megatron.core.transformer.moe import moe_utils
mixture = specs.get_gpt_layer_with_transformer_engine_spec(num_experts=8, moe_grouped_gemm=True).submodules.mlp
assert mixture.submodules.experts.module.__name__ == "TEGroupedMLP" and moe_utils.te_general_gemm is None
assert specs.torch is torch if hasattr(specs, "torch") else True
assert (MegatronModule.cuda, torch.Tensor.pin_memory) == (cuda, pinned)
host = [name for name in sys.modules if name.endswith((".megatron.adapt", ".host_torch", ".megatron.host_engines"))]
assert host == [], host
"""


def test_on_an_accelerator_the_torch_layers_come_without_anything_of_the_host() -> None:
    """As a training process with `platform=accelerator_without_te` does it, up to what needs the device."""
    env = child_environment() | {
        "VERL_ENGINE_DEVICE": "cuda",
        "VERL_ENGINE_VENDOR": "nvidia",
        "PATH": os.environ["PATH"],
    }
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", WITHOUT_TE], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
