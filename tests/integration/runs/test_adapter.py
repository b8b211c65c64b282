"""A run whose adapter alone is trained, staged and committed, and the same run resumed; one that commits it merged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.job import AGENT, Job, run

from seamless_verl.journal import JournalReader

pytestmark = [pytest.mark.integration, pytest.mark.long]
ACTOR, LORA = "actor_rollout_ref__actor__", "actor_rollout_ref__model__lora__"
RANK, ALPHA = 8, 16
OPTIONS: dict[str, Any] = {
    f"{LORA}rank": 8,
    f"{LORA}alpha": ALPHA,
    f"{ACTOR}megatron__vanilla_mbridge": False,
    f"{ACTOR}checkpoint__save_contents": "[model,optimizer,extra,hf_model]",
    "seamless__max_staleness": 0,
}
CLOSE, FAR = 1e-4, 1e-2


def test_trainer_and_rollout_agree_on_the_adapter_also_when_resumed(nano: Path, tmp_path: Path) -> None:
    """No load format is set: the run chooses one with which engines have the model's own weights."""
    options = OPTIONS | {"trainer__save_freq": 3}
    first = run(tmp_path, nano, **options, trainer__total_training_steps=3)
    assert "load_format=safetensors, since engines are sent the adapter alone" in first.log()
    adapter, model = adapter_of(first, 3), nano / "model/model.safetensors"
    assert 0 < 4 * adapter.stat().st_size < model.stat().st_size
    for steps, metrics in enumerate(first.metrics().values(), 1):
        assert metrics["training/rollout_logprob_diff_max"] < 2e-2 and metrics["actor/grad_norm"] > 0, steps
    resumed = run(tmp_path, nano, **options, trainer__resume_mode="auto", trainer__total_training_steps=5).metrics()
    assert resumed.keys() == {4, 5} and all(resumed[i]["training/rollout_logprob_diff_max"] < 2e-2 for i in (4, 5))


def adapter_of(job: Job, step: int) -> Path:
    folder = job.folder / f"checkpoints/global_step_{step}/actor"
    return folder / "model/huggingface/adapter/adapter_model.safetensors"


def test_engines_of_a_merged_adapter_generate_as_the_merged_model(nano: Path, tmp_path: Path) -> None:
    """Each token of the second step has the logprob of the model merged here from the first step's checkpoint."""
    more = {f"{LORA}merge": True, f"{ACTOR}optim__lr": 1e-2, "trainer__save_freq": 1}
    job = run(tmp_path, nano, **AGENT, **OPTIONS, **more, trainer__total_training_steps=2)
    assert all(metrics["training/rollout_logprob_diff_max"] < 2e-2 for metrics in job.metrics().values())
    merged, base = (errors(one, job, version=1) for one in models(nano / "model", adapter_of(job, 1)))
    print(f"\nlargest error of {len(merged)} segments: {max(merged):.1e}, without the adapter {max(base):.1e}")  # noqa: T201
    assert max(merged) < CLOSE and max(base) > FAR


def models(folder: Path, adapter: Path) -> Iterator[Any]:
    """The model in bf16 with the adapter merged, and without; both compute in fp32, as the engines do."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    weights = load_file(adapter)
    for scale in (ALPHA / RANK, 0.0):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        for name, module in model.named_modules():
            parts = [weights.get(f"base_model.model.{name}.lora_{which}.weight") for which in "BA"]
            if parts[0] is not None and parts[1] is not None:
                module.weight.data += scale * (parts[0] @ parts[1]).to(torch.bfloat16)
        yield model.float()


def errors(model: Any, job: Job, version: int) -> list[float]:
    """The largest difference to the model's logprobs in each segment of this version that the journal has."""
    import torch

    reader, found = JournalReader(job.folder / "checkpoints" / "trajectories.sqlite"), list[float]()
    for summary in reader.sessions():
        for call in reader.read(summary.session_id).calls:
            ids = list(call.prompt_ids)
            for segment in call.segments:
                begin, ids = len(ids), [*ids, *segment.ids]
                if segment.version == version:
                    with torch.no_grad():
                        rows = model(torch.tensor([ids])).logits[0, begin - 1 : -1].log_softmax(-1)
                    own = rows.gather(1, torch.tensor(ids[begin:])[:, None])[:, 0]
                    found.append(float((own - torch.tensor(list(segment.logprobs))).abs().max()))
    return found


FSDP: dict[str, Any] = {
    "model_engine": "dp",
    f"{ACTOR}strategy": "fsdp2",
    # In bf16 verl rounds logprobs to it, by up to 0.03 here, which would hide much.
    f"+{ACTOR}fsdp_config__mixed_precision": "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}",
    "trainer__n_gpus_per_node": 2,
    "seamless__max_staleness": 0,
    "trainer__save_freq": 2,
    "trainer__resume_mode": "auto",
}
ADAPTED = {"actor_rollout_ref__model__lora_rank": 8, "actor_rollout_ref__model__lora_alpha": ALPHA}


@pytest.mark.parametrize("adapter", [ADAPTED, {}], ids=["adapter", "whole_model"])
def test_fsdp_and_rollout_agree_on_two_devices_also_when_resumed(
    nano: Path, tmp_path: Path, adapter: dict[str, Any]
) -> None:
    for steps in ({1, 2, 3}, {4, 5}):  # a run saves its last step, too
        metrics = run(tmp_path, nano, **FSDP, **adapter, trainer__total_training_steps=max(steps)).metrics()
        assert metrics.keys() == steps
        for step in steps:
            print(step, metrics[step]["training/rollout_logprob_diff_max"])  # noqa: T201
            assert metrics[step]["training/rollout_logprob_diff_max"] < CLOSE, step
            assert metrics[step]["actor/grad_norm"] > 0, step
