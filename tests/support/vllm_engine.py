"""A real AsyncLLM with verl's worker extension, for integration tests."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import uuid
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
import torch
import zmq

from seamless_verl.platform.cores import CPU_CORES, VISIBLE_DEVICES

T = TypeVar("T")
EXTENSION = "verl.workers.rollout.vllm_rollout.utils.vLLMColocateWorkerExtension"


@dataclass(frozen=True)
class Sample:
    """One generation: token ids and, for each generated one, its logprob at sampling."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    finish: str | None


@dataclass
class Engine:
    """The engine and the one event loop it lives on."""

    llm: Any
    runner: asyncio.Runner
    replica: str
    first: list[Sample] = field(default_factory=list)
    requests: int = 0
    lora: Any = None  # the adapter of all requests

    def run(self, task: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(task)

    async def stream(self, prompt: list[int], tokens: int) -> AsyncIterator[Sample]:
        """Every output of one request at temperature 1; the last one is the whole generation."""
        from vllm import SamplingParams

        self.requests += 1
        seed = self.requests
        params = SamplingParams(
            temperature=1.0, max_tokens=tokens, ignore_eos=True, logprobs=0, detokenize=False, seed=seed
        )
        prompted = {"prompt_token_ids": prompt}
        async for output in self.llm.generate(prompted, params, request_id=str(seed), lora_request=self.lora):
            completion = output.outputs[0]
            ids = list(completion.token_ids)
            logprobs = [entry[token].logprob for entry, token in zip(completion.logprobs, ids, strict=True)]
            yield Sample(prompt, ids, logprobs, completion.finish_reason)

    async def sample(self, prompt: list[int], tokens: int) -> Sample:
        return [output async for output in self.stream(prompt, tokens)][-1]

    async def torch_threads(self) -> list[int]:
        """Threads that torch computes with, in each worker."""
        return await self.llm.collective_rpc(lambda worker: torch.get_num_threads())

    async def samples(self, prompts: list[list[int]], tokens: int) -> list[Sample]:
        return await asyncio.gather(*(self.sample(prompt, tokens) for prompt in prompts))

    async def update(self, weights: Mapping[str, torch.Tensor], bucket_mb: int, caches: bool = True) -> None:
        """Sends weights as verl does between colocated processes, through shared memory; then empties `caches`."""
        from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

        job = os.environ["VERL_RAY_JOB_ID"]
        handle = f"ipc:///tmp/rl-colocate-zmq-{job}-replica-{self.replica}-rank-0.sock"
        sender = BucketedWeightSender(handle, bucket_size_mb=bucket_mb, use_shm=True)
        sending = asyncio.to_thread(asyncio.run, sender.async_send_weights(iter(weights.items())))
        receiving: Awaitable[Any] = self.llm.collective_rpc("update_weights_from_ipc", kwargs={"use_shm": True})
        # Without a limit a receiver that failed would leave verl's sender waiting for ever.
        zmq.Context.instance().setsockopt(zmq.RCVTIMEO, 20_000)
        await asyncio.gather(sending, receiving)
        if caches:
            await self.llm.reset_prefix_cache()

    def close(self) -> None:
        """Stops the engine, and closes what it and verl's sender leave open, before a later test is blamed for it."""
        self.llm.shutdown()
        self.llm = None
        gc.collect()
        zmq.Context.instance().term()


@asynccontextmanager
async def no_generation(engine: Engine, mode: str) -> AsyncIterator[None]:
    """Generation paused inside the block."""
    await engine.llm.pause_generation(mode=mode)
    try:
        yield
    finally:
        await engine.llm.resume_generation()


def settings(model: Path, **options: Any) -> dict[str, Any]:
    """The arguments of an engine for `model` in fp32, like those of verl's server: mp executor, extension, eager."""
    return {
        "model": str(model),
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "enable_sleep_mode": True,
        "max_model_len": 1024,
        "max_num_seqs": 16,
        "kv_cache_memory_bytes": 32 << 20,
        "distributed_executor_backend": "mp",
        "worker_extension_cls": EXTENSION,
        "disable_log_stats": True,
        **options,
    }


def environment(replica: str, cores: Sequence[int], devices: Sequence[int]) -> dict[str, str]:
    """Environment variables of an engine's processes; each engine has a job id of its own."""
    return {
        "VERL_PLATFORM": "cpu",
        "VERL_RAY_JOB_ID": uuid.uuid4().hex[:8],
        "VERL_REPLICA_RANK": replica,
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        CPU_CORES: ",".join(map(str, cores)),
        VISIBLE_DEVICES: ",".join(map(str, devices)),
    }


@contextmanager
def started(model: Path, *, cores: Sequence[int], devices: Sequence[int], **options: Any) -> Iterator[Engine]:
    """Starts an engine with `settings`."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    async def build() -> Any:
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**settings(model, **options)))

    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        for name, value in environment("0", cores, devices).items():
            patch.setenv(name, value)
        engine = Engine(runner.run(build()), runner, "0")
        try:
            yield engine
        finally:
            engine.close()


def processes(name: str) -> list[psutil.Process]:
    """This test's descendants whose command line names a vLLM role, such as "EngineCore"."""
    found = []
    for p in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended since it was listed, or is a zombie
            found += [p] if name in " ".join(p.cmdline()) else []
    return sorted(found, key=lambda p: p.pid)


def allowed_cores(process: psutil.Process) -> set[int]:
    """Union of the cores that the process's threads may run on."""
    tasks = Path(f"/proc/{process.pid}/task").iterdir()
    return set().union(*(os.sched_getaffinity(int(task.name)) for task in tasks))


def reference_logprobs(model: Any, sample: Sample) -> torch.Tensor:
    """Transformers' fp32 logprob of each generated token, shape (tokens,)."""
    ids = torch.tensor([sample.prompt + sample.tokens])
    with torch.no_grad():
        logits = model(ids).logits[0, len(sample.prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(sample.tokens)[:, None])[:, 0]


def largest_error(model: Any, samples: list[Sample]) -> float:
    """Largest absolute difference between the engine's logprobs and the model's."""
    return max(
        (reference_logprobs(model, sample) - torch.tensor(sample.logprobs)).abs().max().item() for sample in samples
    )


def redrawn(model: Any, seed: int, only: str = "") -> tuple[Any, dict[str, torch.Tensor]]:
    """A copy with new random values for the weights whose names contain `only`, and these weights."""
    generator = torch.Generator().manual_seed(seed)
    model = copy.deepcopy(model)
    chosen = {name: weight for name, weight in model.named_parameters() if only in name}
    with torch.no_grad():
        for weight in chosen.values():
            # Norms stay away from zero; matrices are wide enough that the logits move.
            center, spread = (1.0, 0.3) if weight.ndim == 1 else (0.0, 0.1)
            weight.copy_(center + spread * torch.randn(weight.shape, generator=generator))
    return model, {name: weight.detach() for name, weight in chosen.items()}
