"""The logprobs that an engine gives tokens which it reads, by its present weights, at any temperature.

vLLM's logprobs of a prompt are of temperature 1. Nothing else asks an engine for them, so that one temperature is at
work at a time.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm import SamplingParams
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind

TEMPERATURE = "seamless_temperature"
"""In SamplingParams.extra_args: of the logits from which the logprobs of the prompt are made."""


class Rereading:
    """Reads one sequence at a time; owned state: the request that is read, and for how long a pause waits for it.

    Then the pause aborts it: once frozen, it would be read on by the next weights.
    """

    def __init__(self, engine: Any, lora: Any) -> None:
        self.engine, self.lora = engine, lora
        self.reading: asyncio.Task[Any] | None = None
        self.patience_s = 0.0
        self.resumed = asyncio.Event()  # of the engine's next resume

    def engine_resumed(self) -> None:
        self.resumed.set()
        self.resumed = asyncio.Event()

    async def logprobs(
        self, ids: Sequence[int], patience_s: float, temperature: float = 1.0
    ) -> NDArray[np.float32] | None:
        """Of each token but the first, float32 [tokens - 1] in nats; None if it was not read whole.

        What is beyond the engine's longest sequence is not read.
        """
        if self.reading is not None:
            return None
        ids = list(ids)[: self.engine.model_config.max_model_len - 1]  # it also generates one token, as it must
        self.patience_s, self.reading = patience_s, asyncio.ensure_future(self._read(ids, temperature))
        try:
            await asyncio.wait([reading := self.reading])
            if reading.cancelled():
                return None
            read = reading.result()
        finally:
            self.reading.cancel()  # if it is this call that is cancelled
            self.reading = None
        if read is None or len(read) != len(ids):
            return None
        return np.asarray([entry[token].logprob for entry, token in zip(read[1:], ids[1:], strict=True)], np.float32)

    async def _read(self, ids: list[int], temperature: float) -> Any:
        params = SamplingParams(
            prompt_logprobs=0, max_tokens=1, temperature=0.0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        params.extra_args = {TEMPERATURE: temperature}
        if self.engine.model_config.enable_return_routed_experts:
            params.routed_experts_prompt_start = len(ids) - 1
        name, read = f"reread-{uuid.uuid4().hex}", None
        prompt = TokensPrompt(prompt_token_ids=ids, cache_salt=name)  # nothing of it is found again by later weights
        async for output in self.engine.generate(prompt, params, name, lora_request=self.lora):
            read = output.prompt_logprobs
        return read

    async def end(self) -> None:
        """Returns when what is read has been read, or is aborted."""
        if self.reading is not None:
            await asyncio.wait([self.reading], timeout=self.patience_s)
        if self.reading is not None:
            self.reading.cancel()  # by which vLLM aborts the request
            await asyncio.wait([self.reading])


class ReadingTemperature:
    """Has a worker's model runner make a prompt's logprobs at the temperature of its request. Owned state: that of the
    request that is read, with vLLM's second model runner."""

    def __init__(self, worker: Any) -> None:
        self.runner, self.temperature = worker.model_runner, 1.0
        if not getattr(worker, "use_v2_model_runner", False):
            self.read = self.runner._get_prompt_logprobs_dict
            self.runner._get_prompt_logprobs_dict = self.of_first_runner
        elif (prompts := self.runner.prompt_logprobs_worker) is not None:  # only the last stage of a pipeline has one
            self.add, self.read = prompts.add_request, prompts.compute_prompt_logprobs
            prompts.add_request, prompts.compute_prompt_logprobs = self.add_request, self.of_second_runner

    def of_first_runner(self, *args: Any) -> Any:
        if not self.runner.num_prompt_logprobs:
            return self.read(*args)
        running = (self.runner.requests[name] for name in self.runner.num_prompt_logprobs)
        temperature, sampler = next(temperature_of(one.sampling_params) for one in running), self.runner.sampler
        compute = sampler.compute_logprobs
        vars(sampler)["compute_logprobs"] = at_temperature(compute, temperature)
        try:
            return self.read(*args)
        finally:
            del vars(sampler)["compute_logprobs"]

    def add_request(self, req_id: str, req_idx: int, sampling_params: SamplingParams) -> None:
        if sampling_params.prompt_logprobs is not None:
            self.temperature = temperature_of(sampling_params)
        self.add(req_id, req_idx, sampling_params)

    def of_second_runner(self, logits_fn: Callable[[Any], Any], *args: Any) -> Any:
        return self.read(lambda hidden: logits_fn(hidden).float() / self.temperature, *args)


def at_temperature(compute: Callable[[Any], Any], temperature: float) -> Callable[[Any], Any]:
    return lambda logits: compute(logits.float() / temperature)


def temperature_of(params: SamplingParams) -> float:
    return float((params.extra_args or {}).get(TEMPERATURE, 1.0))
