"""What one engine on one device generates in a second, alone, by how many samples are in flight.

`python -m seamless_verl.bench.training.rates --workload w2 --model DIR --out FILE`: a closed loop. As many clients
as samples in flight, each asking for the workload's own lengths one after the other; tokens are counted in a window
that begins when the clients have spread. Samples that wait for a tool are not in flight, so tools take no time here.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from seamless_verl.bench.training.settings import KV_CACHE_BYTES, bench_cores
from seamless_verl.bench.training.workloads import PROMPT_TOKENS, Workload, workload_named
from seamless_verl.platform.cores import CPU_CORES, VISIBLE_DEVICES
from seamless_verl.tiny.files import replaced_file

IN_FLIGHT = (1, 2, 4, 8, 16, 32, 64)
WARM_S, WINDOW_S = 2.0, 6.0
PROMPT = tuple(b"1+1=")


def build(model: Path, workload: Workload) -> Any:
    """An engine with the settings that the platform's config and the bench give to every arm's."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    settings = AsyncEngineArgs(
        model=str(model),
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=PROMPT_TOKENS + workload.response_tokens,
        max_num_seqs=workload.seats,
        kv_cache_memory_bytes=KV_CACHE_BYTES,
        distributed_executor_backend="mp",
        disable_log_stats=True,
    )
    return AsyncLLM.from_engine_args(settings)


class ClosedLoop:
    """Clients that keep a number of samples in flight; `tokens` counts everything generated so far."""

    def __init__(self, llm: Any, lengths: Iterator[int]) -> None:
        self.llm, self.lengths, self.tokens = llm, lengths, 0

    async def client(self) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        while True:
            sampling = SamplingParams(
                temperature=1.0,
                max_tokens=next(self.lengths),
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            prompt = {"prompt_token_ids": list(PROMPT)}
            async for output in self.llm.generate(prompt, sampling, request_id=uuid.uuid4().hex):
                self.tokens += len(output.outputs[0].token_ids)

    async def rate(self, in_flight: int) -> float:
        """Tokens a second with so many samples in flight."""
        clients = [asyncio.create_task(self.client()) for _ in range(in_flight)]
        await asyncio.sleep(WARM_S)  # not measured: the first prompts are computed in it
        before, began = self.tokens, time.perf_counter()
        await asyncio.wait(clients, timeout=WINDOW_S, return_when=asyncio.FIRST_EXCEPTION)
        tokens, seconds = self.tokens - before, time.perf_counter() - began
        for client in clients:
            client.cancel()
        for end in await asyncio.gather(*clients, return_exceptions=True):
            if isinstance(end, Exception):  # which a cancelled client is not
                raise end
        return tokens / seconds


def lengths_of(workload: Workload) -> Iterator[int]:
    """Lengths of turns in the data set's order, without end."""
    for index in count():
        for session in range(workload.samples):
            yield from (turn.tokens for turn in workload.sample(index, session))


async def measure(model: Path, workload: Workload) -> dict[int, float]:
    llm = build(model, workload)
    try:
        lengths = lengths_of(workload)
        sizes = sorted({*(size for size in IN_FLIGHT if size < workload.seats), workload.seats})
        return {size: await ClosedLoop(llm, lengths).rate(size) for size in sizes}
    finally:
        llm.shutdown()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m seamless_verl.bench.training.rates", description=__doc__)
    parser.add_argument("--workload", required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    os.environ.update(
        {CPU_CORES: ",".join(map(str, bench_cores())), VISIBLE_DEVICES: "0", "VLLM_NO_USAGE_STATS": "1"},
    )
    rates = asyncio.run(measure(options.model, workload_named(options.workload)))
    with replaced_file(options.out) as temporary:
        temporary.write_text(json.dumps(rates))
    return 0


if __name__ == "__main__":
    sys.exit(main())
