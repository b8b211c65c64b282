"""Megatron alone, on one device: verl's engine with layers in plain torch, against transformers and against vLLM."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gpu.place import Place, SkippedError

LEARNING_CALLS, TOKENS, LEARNING_RATE = 4, 4096, 1e-4
CLOSE, CORRELATED = 0.05, 0.999  # mean difference of logprobs in bf16; of the tokens' probabilities


@contextmanager
def started(place: Place) -> Iterator[Any]:
    """verl's Megatron engine on the device, in this process's own group of one rank.

    The group ends with the block, also when a check fails: a process that ends with an open NCCL group waits in it.
    """
    import torch
    from support.megatron_process import build_engine
    from verl.utils.distributed import initialize_global_process_group_ray

    if place.cuda:
        from seamless_verl.platform.engine_without_te import register_engines

        torch.cuda.set_device(0)
    else:
        from seamless_verl.platform.engine import register_engines

        torch.set_num_threads(1)
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", DIST_INIT_METHOD=f"file://{place.folder}/store")
    register_engines()
    initialize_global_process_group_ray()
    try:
        engine = build_engine({"model": str(place.model), "tokens": TOKENS, "lr": LEARNING_RATE})
        engine.initialize()
        yield engine
    finally:
        torch.distributed.destroy_process_group()


def sequences(longest: int = 500) -> list[list[int]]:
    draw = random.Random(3)
    return [[draw.randrange(256) for _ in range(draw.randrange(8, longest))] for _ in range(16)]


def logprobs(engine: Any, rows: list[list[int]]) -> list[Any]:
    """Of each row, on the host: entry t is the logprob of token t + 1; the last one has no meaning."""
    import torch
    from support.megatron_process import batch_of

    with engine.eval_mode(), torch.no_grad():
        out = engine.infer_batch(batch_of(rows), loss_function=None)
    return [row.float().cpu()[:-1] for row in out["model_output"]["log_probs"].unbind()]


def update(engine: Any, rows: list[list[int]]) -> float:
    from support.megatron_process import batch_of
    from verl.workers.utils.losses import sft_loss

    with engine.train_mode():
        out = engine.train_batch(batch_of(rows), loss_function=partial(sft_loss, config=None))
        engine.lr_scheduler_step()
    return float(sum(out["loss"]))


def differences(name: str, place: Place, measured: list[Any], expected: list[Any]) -> None:
    """Report and bound the differences of two lists of logprobs."""
    import torch

    found, wanted = torch.cat(measured), torch.cat(expected)
    error = (found - wanted).abs()
    correlation = torch.corrcoef(torch.stack([found.exp(), wanted.exp()]))[0, 1].item()
    figures = {"tokens": len(found), "mean": error.mean().item(), "largest": error.max().item()}
    place.report(name, **figures, correlation=correlation)
    assert figures["mean"] < CLOSE and correlation > CORRELATED, (figures, correlation)


def reference(place: Place, rows: list[list[int]]) -> list[Any]:
    """transformers in fp32 on the weights rounded to bf16."""
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if place.cuda else "cpu"
    model = AutoModelForCausalLM.from_pretrained(place.model, dtype=torch.bfloat16, attn_implementation="eager")
    model, found = model.float().to(device), []
    for ids in (torch.tensor(row, device=device) for row in rows):
        with torch.no_grad():
            logits = model(ids[None]).logits[0, :-1].log_softmax(-1)
        found.append(logits.gather(1, ids[1:, None])[:, 0].cpu())
    return found


def check_attention(place: Place) -> None:
    """The kernel for packed sequences against a call for each of them, and for a forest's segments: output, gradients,
    and milliseconds of all."""
    import torch

    from seamless_verl.platform.megatron.layers import SDPAttention
    from seamless_verl.shared_prefixes.forward import ForestParams
    from seamless_verl.shared_prefixes.layout import build_forest

    if not place.cuda:
        raise SkippedError("torch has this kernel for cards alone")
    torch.backends.cuda.enable_cudnn_sdp(False)  # as these layers have it
    config = SimpleNamespace(kv_channels=128, attention_dropout=0.0)
    attention, rows = SDPAttention(config, 1), sequences() * 4
    lengths = [len(row) for row in rows]
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda")
    packed = SimpleNamespace(cu_seqlens_q=bounds, cu_seqlens_q_padded=None)
    forest = build_forest([[*row, number] for number, row in enumerate(rows)])  # each row four times, with other ends
    params = ForestParams.of(forest, torch.device("cuda"))
    ways = {
        "pack": (sum(lengths), lambda *given: attention(*given, None, packed_seq_params=packed)),
        "each": (sum(lengths), lambda *given: attention.attend_packed(*given, lengths)),
        "forest": (len(forest.tokens), lambda *given: attention(*given, None, packed_seq_params=params)),
        "segments": (len(forest.tokens), lambda *given: attention.attend_forest(*given, forest)),
    }
    outputs, figures = {}, {}
    for name, (tokens, way) in ways.items():
        draw = torch.Generator("cuda").manual_seed(tokens)
        made = (torch.randn((tokens, n, 128), device="cuda", dtype=torch.bfloat16, generator=draw) for n in (16, 8, 8))
        inputs = [one.requires_grad_() for one in made]
        assert attention.has_kernel_for_packs(inputs[0], inputs[2])
        for timed in (False, True):
            torch.cuda.synchronize()
            began = time.perf_counter()
            out = way(*inputs)
            outputs[name] = [out, *torch.autograd.grad(out, inputs, torch.ones_like(out))]
            torch.cuda.synchronize()
            if timed:
                figures[f"{name}_ms"] = 1e3 * (time.perf_counter() - began)
    pairs = [*zip(outputs["pack"], outputs["each"], strict=True)]
    pairs += zip(outputs["forest"], outputs["segments"], strict=True)
    apart = [((a - b).float().norm() / b.float().norm()).item() for a, b in pairs]
    place.report("attention", tokens=sum(lengths), rows=len(forest.tokens), apart=apart, **figures)
    assert max(apart) < 0.02, apart


def check_training(place: Place) -> None:
    """Log-probabilities, four updates, and an engine that continues from its checkpoint as before."""
    began = time.perf_counter()
    with started(place) as engine:
        place.report("started", seconds=time.perf_counter() - began)
        train(place, engine, sequences())


def train(place: Place, engine: Any, rows: list[list[int]]) -> None:
    differences("transformers", place, logprobs(engine, rows), reference(place, rows))
    losses, times = [], []
    for number in range(LEARNING_CALLS):
        if number == LEARNING_CALLS - 1:
            engine.save_checkpoint(str(place.folder / "checkpoint"), global_step=number)
        began = time.perf_counter()
        losses.append(update(engine, rows))
        times.append(time.perf_counter() - began)
    place.report("updates", losses=losses, seconds=times)
    engine.load_checkpoint(str(place.folder / "checkpoint"), del_local_after_load=False)
    again = update(engine, rows)
    place.report("resumed", loss=again, before=losses[-1])
    assert abs(again - losses[-1]) < 1e-3, (again, losses)
    weights, _ = engine.get_per_tensor_param()
    place.report("export", weights=sum(1 for _ in weights))
    assert losses[-1] < losses[0], losses


def check_agreement(place: Place) -> None:
    """The logprobs that vLLM sampled with, and those that Megatron gives to the same tokens and weights."""
    import asyncio

    import torch
    from support.engine_requests import RunningRequest

    from gpu.engine import PROMPTS, engine_of
    from seamless_verl.replica.engine_source import AsyncLLMSource

    async def sampled(llm: Any) -> list[tuple[list[int], list[float]]]:
        source = AsyncLLMSource(llm, version=0)
        calls = [RunningRequest(source, f"sample-{i}", prompt, 256) for i, prompt in enumerate(PROMPTS)]
        await asyncio.gather(*(call.task for call in calls))
        return [(call.prompt + call.column("ids"), call.column("logprobs")) for call in calls]

    with engine_of(place, dtype="bfloat16") as engine:
        samples = engine.run(sampled(engine.llm))
    with started(place) as engine:
        measured = logprobs(engine, [ids for ids, _ in samples])
    own = [row[-len(values) :] for row, (_, values) in zip(measured, samples, strict=True)]
    differences("vllm_and_megatron", place, own, [torch.tensor(values) for _, values in samples])


def check_memory(place: Place) -> None:
    """An update of one full micro-batch: torch.cuda's peak against what the memory check before a run counts."""
    with started(place) as engine:
        measure_memory(place, engine)


def measure_memory(place: Place, engine: Any) -> None:
    import torch

    from seamless_verl.resources.memory import TrainingMemory, activations, trainer_state
    from seamless_verl.resources.model_facts import ModelFacts
    from seamless_verl.resources.parallel import ParallelSizes

    rows = [[1 + i % 250 for i in range(TOKENS // 8)]] * 8
    update(engine, rows)  # makes the optimizer's state
    if place.cuda:
        torch.cuda.reset_peak_memory_stats()
    update(engine, rows)
    facts = ModelFacts.read(json.loads(Path(place.model, "config.json").read_text()))
    assert facts is not None and facts.exact
    settings = TrainingMemory(tokens=TOKENS, sequence=TOKENS // 8, plain_layers=place.cuda)
    state = trainer_state(facts, ParallelSizes(), 1, settings)
    parts = {**state, "activations": activations(facts, ParallelSizes(), TOKENS, settings)}
    estimate = sum(parts.values())
    place.report("estimate", gb=estimate / 1e9, **{name: size / 1e9 for name, size in parts.items()})
    if place.cuda:
        peak = torch.cuda.max_memory_allocated()
        place.report("peak", gb=peak / 1e9, reserved_gb=torch.cuda.max_memory_reserved() / 1e9, of_it=peak / estimate)
        assert peak < 1.1 * estimate, f"peak {peak / 1e9:.2f} GB, estimated {estimate / 1e9:.2f} GB"
