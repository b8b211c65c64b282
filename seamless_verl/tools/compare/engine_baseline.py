"""What a workload needs before its arms are checked: its data, and how fast an engine alone is here.

`python -m seamless_verl.tools.compare.engine_baseline WORKLOAD MODEL OUT` measures that in a closed loop: as many
clients as samples in flight, each requesting the workload's own lengths one after the other. Tokens are counted in a
window that begins when the clients have spread. Samples that wait for a tool are not in flight, so tools take no time.
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
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from seamless_verl.errors import ConfigError
from seamless_verl.platform.cores import CPU_CORES, VISIBLE_DEVICES
from seamless_verl.platform.detect import set_cpu_environment
from seamless_verl.runtime.files import replaced_file
from seamless_verl.runtime.scratch import scratch_folder
from seamless_verl.tools.compare.job import Job, Options
from seamless_verl.tools.compare.running import managed_process
from seamless_verl.tools.compare.workloads import (
    DEVICES,
    KV_CACHE_BYTES,
    WORKLOADS,
    Workload,
    make_data,
    write_loops,
)

MODULE, RATES_FILE, LOG_FILE = "seamless_verl.tools.compare.engine_baseline", "rates.json", "rates.txt"
WARM_S, WINDOW_S = 6.0, 6.0
PROMPT = tuple(b"1+1=")


def with_data(job: Job, options: Options) -> Job:
    """The job with what a workload needs before it is checked; any other one as it is.

    A tool of a workload takes as long as a turn does on this machine, for which an engine is measured alone, once in
    each folder; it is measured for the bound of the report, too.
    """
    workload = job.workload
    if workload is None:
        return job
    if options.validate:
        reason = "the lengths of a workload's responses are forced, so that there is nothing to learn"
        raise ConfigError("--validate", options.validate, reason, "Leave it out")
    make_data(workload, options.steps, job.data)
    has_tool = workload.tool is not None
    rates = measured_rates(workload, job.data, options.timeout_s) if options.bound or has_tool else {}
    if has_tool and not rates:
        reason = "the engine could not be measured alone, and so it is unknown how long a tool is to take"
        raise ConfigError("CONFIG|RECIPE", job.name, reason, f"See {job.data / LOG_FILE}")
    if has_tool:
        workload = workload.with_turn(workload.turn_s(rates))
    write_loops(workload, job.data)
    return replace(job, workload=workload, rates=rates)


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
    with (
        scratch_folder() as scratch,  # vLLM leaves its sockets in TMPDIR
        (data / LOG_FILE).open("wb") as log,
        managed_process(command, log, env | {"TMPDIR": str(scratch)}) as process,
    ):
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            reason = f"it took more than --timeout {timeout_s:g}; {reason}"
    if process.returncode != 0:
        sys.stderr.write(f"The engine could not be measured alone: {reason}\n")


async def rate_of(llm: Any, lengths: Iterator[int], in_flight: int) -> float:
    """Tokens a second of an engine with `in_flight` samples in flight."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    generated = 0

    async def client() -> None:
        nonlocal generated
        options = {"temperature": 1.0, "ignore_eos": True, "logprobs": 0, "detokenize": False}
        while True:
            sampling = SamplingParams(max_tokens=next(lengths), output_kind=RequestOutputKind.DELTA, **options)
            prompt = {"prompt_token_ids": list(PROMPT)}
            async for output in llm.generate(prompt, sampling, request_id=uuid.uuid4().hex):
                generated += len(output.outputs[0].token_ids)

    clients = [asyncio.create_task(client()) for _ in range(in_flight)]
    await asyncio.sleep(WARM_S)  # not measured: the first prompts, and kernels for shapes of batches
    before, began = generated, time.perf_counter()
    await asyncio.wait(clients, timeout=WINDOW_S, return_when=asyncio.FIRST_EXCEPTION)
    rate = (generated - before) / (time.perf_counter() - began)
    for one in clients:
        one.cancel()
    for end in await asyncio.gather(*clients, return_exceptions=True):
        if isinstance(end, Exception):  # a cancelled client is none
            raise end
    return rate


async def measure(model: Path, workload: Workload) -> dict[int, float]:
    """The rates of an engine with the settings that the platform's config and the workload give to every arm's.

    They are those of a device's samples, by which tools last, and of all seats, by which the bound is.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    settings = AsyncEngineArgs(
        model=str(model),
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=workload.prompt_tokens + workload.response_tokens,
        max_num_seqs=workload.seats,
        kv_cache_memory_bytes=KV_CACHE_BYTES,
        distributed_executor_backend="mp",
        disable_log_stats=True,
    )
    samples = (workload.sample(index, session) for index in count() for session in range(workload.samples))
    lengths = (turn.tokens for turns in samples for turn in turns)  # in the data set's order, without end
    llm = AsyncLLM.from_engine_args(settings)
    try:
        return {size: await rate_of(llm, lengths, size) for size in (workload.in_flight, workload.seats)}
    finally:
        llm.shutdown()


if __name__ == "__main__":
    name, model, out = sys.argv[1:]
    with replaced_file(Path(out)) as temporary:
        temporary.write_text(json.dumps(asyncio.run(measure(Path(model), WORKLOADS[name]))))
