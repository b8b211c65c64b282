"""The logprobs that an engine gives tokens which it reads, by its present weights."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm import SamplingParams
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind


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

    async def logprobs(self, ids: Sequence[int], patience_s: float) -> NDArray[np.float32] | None:
        """Of each token but the first, float32 [tokens - 1] in nats, at temperature 1; None if it was not read whole.

        What is beyond the engine's longest sequence is not read.
        """
        if self.reading is not None:
            return None
        ids = list(ids)[: self.engine.model_config.max_model_len - 1]  # it also generates one token, as it must
        self.patience_s, self.reading = patience_s, asyncio.ensure_future(self._read(ids))
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

    async def _read(self, ids: list[int]) -> Any:
        params = SamplingParams(
            prompt_logprobs=0, max_tokens=1, temperature=0.0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
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
