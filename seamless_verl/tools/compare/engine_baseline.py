"""Measures one engine alone: tokens a second by samples in flight, for the bound and for how long a turn takes.

`python -m seamless_verl.tools.compare.engine_baseline WORKLOAD MODEL OUT` measures in a closed loop: as many clients as
samples in flight, each requesting the workload's own lengths one after the other. Tokens are counted in a window that
begins when the clients have spread. Samples that wait for a tool are not in flight, so tools take no time here.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from seamless_verl.platform.cores import CPU_CORES, VISIBLE_DEVICES
from seamless_verl.platform.detect import set_cpu_environment
from seamless_verl.tiny.files import replaced_file
from seamless_verl.tools.compare.running import managed_process
from seamless_verl.tools.compare.workloads import DEVICES, KV_CACHE_BYTES, PROMPT_TOKENS, WORKLOADS, Workload

MODULE, RATES_FILE, LOG_FILE = "seamless_verl.tools.compare.engine_baseline", "rates.json", "rates.txt"
IN_FLIGHT = (1, 2, 4, 8, 16, 32, 64)
WARM_S, WINDOW_S = 2.0, 6.0
PROMPT = tuple(b"1+1=")


def measured_rates(workload: Workload, data: Path, timeout_s: float) -> dict[int, float]:
    """Tokens a second of an engine alone by samples in flight, measured once for a folder; empty where that fails."""
    file = data / RATES_FILE
    if not file.exists():
        measure_rates(workload, data, timeout_s)
    return {int(size): rate for size, rate in json.loads(file.read_text()).items()} if file.exists() else {}


def measure_rates(workload: Workload, data: Path, timeout_s: float) -> None:
    """Measures in a process of its own, whose group ends with it; writes a reason to stderr where that failed."""
    env = dict(os.environ)
    cores = sorted(os.sched_getaffinity(0))[:DEVICES]
    set_cpu_environment(env, cores=cores, devices=DEVICES, pin=True)
    env |= {CPU_CORES: ",".join(map(str, cores)), VISIBLE_DEVICES: "0", "VLLM_NO_USAGE_STATS": "1"}
    words = [workload.name, str(data / "model"), str(data / RATES_FILE)]
    command, reason = [sys.executable, "-W", "ignore", "-m", MODULE, *words], f"see {data / LOG_FILE}"
    with (data / LOG_FILE).open("wb") as log:
        options: dict[str, Any] = {"stdout": log, "stderr": subprocess.STDOUT, "start_new_session": True}
        with managed_process(command, group=True, env=env, **options) as process:
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                reason = f"it took more than --timeout {timeout_s:g}; {reason}"
    if process.returncode != 0:
        sys.stderr.write(f"The engine could not be measured alone: {reason}\n")


class ClosedLoop:
    """Clients that keep a number of samples in flight; `tokens` counts everything generated so far."""

    def __init__(self, llm: Any, lengths: Iterator[int]) -> None:
        self.llm, self.lengths, self.tokens = llm, lengths, 0

    async def client(self) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        options = {"temperature": 1.0, "ignore_eos": True, "logprobs": 0, "detokenize": False}
        while True:
            sampling = SamplingParams(max_tokens=next(self.lengths), output_kind=RequestOutputKind.DELTA, **options)
            prompt = {"prompt_token_ids": list(PROMPT)}
            async for output in self.llm.generate(prompt, sampling, request_id=uuid.uuid4().hex):
                self.tokens += len(output.outputs[0].token_ids)

    async def rate(self, in_flight: int) -> float:
        """Tokens a second with `in_flight` samples in flight."""
        clients = [asyncio.create_task(self.client()) for _ in range(in_flight)]
        await asyncio.sleep(WARM_S)  # not measured: the first prompts are computed in it
        before, began = self.tokens, time.perf_counter()
        await asyncio.wait(clients, timeout=WINDOW_S, return_when=asyncio.FIRST_EXCEPTION)
        tokens, seconds = self.tokens - before, time.perf_counter() - began
        for client in clients:
            client.cancel()
        for end in await asyncio.gather(*clients, return_exceptions=True):
            if isinstance(end, Exception):  # a cancelled client is none
                raise end
        return tokens / seconds


async def measure(model: Path, workload: Workload) -> dict[int, float]:
    """The rates of an engine with the settings that the platform's config and the workload give to every arm's."""
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
    samples = (workload.sample(index, session) for index in count() for session in range(workload.samples))
    lengths = (turn.tokens for turns in samples for turn in turns)  # in the data set's order, without end
    sizes = sorted({*(size for size in IN_FLIGHT if size < workload.seats), workload.seats})
    llm = AsyncLLM.from_engine_args(settings)
    try:
        return {size: await ClosedLoop(llm, lengths).rate(size) for size in sizes}
    finally:
        llm.shutdown()


if __name__ == "__main__":
    name, model, out = sys.argv[1:]
    rates = asyncio.run(measure(Path(model), WORKLOADS[name]))
    with replaced_file(Path(out)) as temporary:
        temporary.write_text(json.dumps(rates))
