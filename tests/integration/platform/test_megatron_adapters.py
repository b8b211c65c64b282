"""Adapters of Megatron-Bridge on two tensor-parallel ranks in plain torch: trained, exported alone, saved for PEFT."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.paths import child_environment

pytestmark = pytest.mark.integration
LORA = {
    "rank": 8, "alpha": 16, "dropout": 0.0, "type": "lora", "merge": False,
    "target_modules": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"],
}  # fmt: skip
UPDATES, SAVED = 4, 2


def sequences() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(256) for _ in range(n)] for n in (5, 17, 40, 90)]


def run(folder: Path, model: Path, **more: Any) -> dict[str, Any]:
    """What the first of two ranks found."""
    folder.mkdir()
    case = {"model": str(model), "out": str(folder), "world": 2, "tp": 2, "lr": 1e-2, "megatron_bridge": True,
            "lora": LORA, "sequences": sequences(), **more}  # fmt: skip
    (folder / "case.json").write_text(json.dumps(case))
    command = [sys.executable, "-W", "ignore", "-c", "from support.megatron_process import main; main()"]
    ranks = [
        subprocess.Popen(
            [*command, str(folder / "case.json"), str(r)], env=child_environment(), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for r in range(2)
    ]  # fmt: skip
    outputs = [rank.communicate(timeout=400)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)[-4000:]
    found: dict[str, Any] = torch.load(folder / "rank0.pt", weights_only=False)
    return found


@pytest.fixture(scope="module")
def trained(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Its folder, with a checkpoint of the second update, and what it found."""
    folder = tmp_path_factory.getbasetemp() / "trained"
    return folder, run(folder, nano / "model", updates=UPDATES, save_before_update=SAVED)


def test_the_adapter_alone_learns_and_is_exported(nano: Path, trained: tuple[Path, dict[str, Any]]) -> None:
    from safetensors.torch import load_file

    found = trained[1]
    assert found["losses"][-1] < found["losses"][0] - 0.3
    base = load_file(nano / "model" / "model.safetensors")
    for name, weight in found["weights"].items():
        assert torch.equal(weight, base[name.replace(".base_layer", "")].to(torch.bfloat16)), name
    adapter = found["adapter"]
    sizes = [base[f"model.layers.{i}.{part}.weight"].shape for i in range(2) for part in PARTS]
    assert sum(weight.numel() for weight in adapter.values()) == sum(LORA["rank"] * sum(size) for size in sizes)


PARTS = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]


def test_peft_loads_the_checkpoints_adapter_and_has_the_trainers_logprobs(
    nano: Path, trained: tuple[Path, dict[str, Any]]
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder, found = trained
    model = AutoModelForCausalLM.from_pretrained(nano / "model", dtype=torch.float32, attn_implementation="eager")
    adapted = PeftModel.from_pretrained(model, folder / "checkpoint" / "model" / "huggingface" / "adapter")
    for ids, measured in zip(map(torch.tensor, sequences()), found["logprobs"][SAVED], strict=True):
        with torch.no_grad():
            logits = adapted(ids[None]).logits[0, :-1].log_softmax(-1)
        assert (logits.gather(1, ids[1:, None])[:, 0] - measured[:-1]).abs().max() < 2e-2


def test_a_resumed_adapter_goes_on_bit_for_bit(
    nano: Path, tmp_path: Path, trained: tuple[Path, dict[str, Any]]
) -> None:
    folder, before = trained
    load = str(folder / "checkpoint")
    after = run(tmp_path / "resumed", nano / "model", updates=UPDATES - SAVED, load=load)
    assert before["losses"][SAVED:] == after["losses"]
    assert all(torch.equal(weight, after["adapter"][name]) for name, weight in before["adapter"].items())
