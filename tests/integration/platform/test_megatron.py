"""Megatron on the host: verl's own engine under every kind of parallelism, against transformers."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.forkserver import forkserver_with, launch
from support.paths import child_environment

pytestmark = [pytest.mark.integration, pytest.mark.slowest(3)]
MODULE = "support.megatron_process"
LAYOUTS = {"one": (1, 1, 1), "tp2": (2, 2, 1), "pp2": (2, 1, 2), "dp2": (2, 1, 1)}


def sequences() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(256) for _ in range(n)] for n in (5, 17, 40, 3, 90, 33, 64, 12)]


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Of processes that are forks of one, as a run's workers are: most of a rank's time would be its imports."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (child_environment() | {"PYTHONWARNINGS": "ignore"}).items():
            patch.setenv(name, value)
        with forkserver_with(MODULE, tmp_path_factory.mktemp("forkserver"), import_s=240) as environ:
            yield environ


def run(
    environ: dict[str, str], folder: Path, model: Path, layout: str, updates: int, **more: Any
) -> list[dict[str, Any]]:
    world, tp, pp = LAYOUTS[layout]
    case = {"model": str(model), "out": str(folder), "world": world, "tp": tp, "pp": pp,
            "updates": updates, "sequences": sequences(), **more}  # fmt: skip
    (folder / "case.json").write_text(json.dumps(case))
    command = ["-c", f"from {MODULE} import main; main()", str(folder / "case.json")]
    ranks = [launch(environ, *command, str(r), stderr=subprocess.STDOUT) for r in range(world)]
    outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world, "\n".join(outputs)[-4000:]
    return [torch.load(folder / f"rank{r}.pt", weights_only=False) for r in range(world)]


def reference_logprobs(model: Path, weights: dict[str, torch.Tensor] | None) -> list[torch.Tensor]:
    """transformers in fp32 on the weights rounded to bf16; entry t is the logprob of token t + 1."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, attn_implementation="eager").float()
    if weights is not None:
        missing = reference.load_state_dict({k: v.float() for k, v in weights.items()}, strict=False).missing_keys
        assert set(missing) <= {"lm_head.weight"}
    rows = []
    with torch.no_grad():
        for ids in (torch.tensor(s) for s in sequences()):
            logits = reference(ids[None]).logits[0, :-1].log_softmax(-1)
            rows.append(logits.gather(1, ids[1:, None])[:, 0])
    return rows


def measured_logprobs(results: list[dict[str, Any]], step: int) -> list[torch.Tensor]:
    """Gather the ranks' log-probabilities in the order of `sequences()`; data ranks took every dp-th."""
    owners = [r["logprobs"][step] for r in results if r["logprobs"]]
    return [owners[i % len(owners)][i // len(owners)][:-1] for i in range(len(sequences()))]


@pytest.fixture(scope="module")
def runs(
    environ: dict[str, str], nano: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    """Four updates in every layout, and a checkpoint after the second (`checkpoint_of`)."""
    base = tmp_path_factory.getbasetemp()
    more = {"updates": 4, "save_before_update": 2}
    return {name: run(environ, made(base / name), nano / "model", name, **more) for name in LAYOUTS}


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


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
        assert torch.corrcoef(torch.stack([measured.exp(), expected.exp()]))[0, 1] > 0.9999


def losses(results: list[dict[str, Any]]) -> torch.Tensor:
    """The loss of each update: the mean over data-parallel ranks."""
    return torch.tensor([r["losses"] for r in results if r["losses"]]).mean(0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_learns_alike(runs: dict[str, list[dict[str, Any]]], layout: str) -> None:
    one, other = losses(runs["one"]), losses(runs[layout])
    assert other[-1] < other[0] - 0.5
    assert torch.allclose(one, other, atol=1e-2), (one, other)


def test_export_without_updates_is_the_model_bit_for_bit(environ: dict[str, str], nano: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    exported = run(environ, tmp_path, nano / "model", "one", updates=0)[0]["weights"]
    original = load_file(nano / "model" / "model.safetensors")
    for name, tensor in exported.items():
        assert torch.equal(tensor, original[name].to(torch.bfloat16)), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_engine_goes_on_bit_for_bit(
    environ: dict[str, str], runs: dict[str, list[dict[str, Any]]], nano: Path, tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory, layout: str,
) -> None:  # fmt: skip
    checkpoint = checkpoint_of(tmp_path_factory, layout)
    resumed = run(environ, tmp_path, nano / "model", layout, updates=2, load=str(checkpoint))
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
from seamless_verl.platform.megatron.engines import use_torch_layers
cuda, pinned = MegatronModule.cuda, torch.Tensor.pin_memory
use_torch_layers()
assert specs.get_gpt_layer_with_transformer_engine_spec().submodules.self_attention is not None
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
