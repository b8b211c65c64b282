"""Measures one engine alone: tokens a second by samples in flight, for the bound and for how long a turn takes.

`python -m seamless_verl.tools.bench.training.engine_baseline --workload w2 --model DIR --out FILE` measures in a closed
loop: as many clients as samples in flight, each requesting the workload's own lengths one after the other. Tokens are
counted in a window that begins when the clients have spread. Samples that wait for a tool are not in flight, so tools
take no time here. `measure_rates` runs this in a process of its own, once for a folder of runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from seamless_verl.errors import ConfigError
from seamless_verl.platform.cores import CPU_CORES, VISIBLE_DEVICES
from seamless_verl.tiny.files import replaced_file
from seamless_verl.tools.bench.training.arms import Arm
from seamless_verl.tools.bench.training.report import RATES_FILE, read_rates
from seamless_verl.tools.bench.training.settings import DEVICES, KV_CACHE_BYTES, BenchPlan, bench_cores
from seamless_verl.tools.bench.training.workloads import PROMPT_TOKENS, Workload, workload_named
from seamless_verl.tools.compare.processes import managed_process

MODULE, LOG_FILE = "seamless_verl.tools.bench.training.engine_baseline", "rates.txt"
IN_FLIGHT = (1, 2, 4, 8, 16, 32, 64)
WARM_S, WINDOW_S = 2.0, 6.0
PROMPT = tuple(b"1+1=")


def build_engine(model: Path, workload: Workload) -> Any:
    """An engine with the settings that the platform's config and the bench give to every arm's engines."""
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


def lengths_of(workload: Workload) -> Iterator[int]:
    """Lengths of turns in the data set's order, without end."""
    for index in count():
        for session in range(workload.samples):
            yield from (turn.tokens for turn in workload.sample(index, session))


async def measure(model: Path, workload: Workload) -> dict[int, float]:
    llm = build_engine(model, workload)
    try:
        lengths = lengths_of(workload)
        sizes = sorted({*(size for size in IN_FLIGHT if size < workload.seats), workload.seats})
        return {size: await ClosedLoop(llm, lengths).rate(size) for size in sizes}
    finally:
        llm.shutdown()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
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


def with_tool_time(
    workload: Workload, turn_s: float | None, *, bound: bool, model: Path, folder: Path, timeout_s: float
) -> Workload:
    """The workload with tools that take `turn_s` on the mean, by default as long as a turn takes on this machine.

    The engine is measured where that default, or the report's bound, needs it; once in each folder. ConfigError where
    the default is needed and the engine could not be measured.
    """
    needs_turn_s = workload.tool is not None and turn_s is None
    file = folder / RATES_FILE
    if (needs_turn_s or bound) and not file.exists():
        measure_rates(workload, model, folder, timeout_s)
    if not needs_turn_s:
        return workload if turn_s is None else workload.with_turn(turn_s)
    if not file.exists():
        reason = "the engine could not be measured alone, and so it is unknown how long a tool is to take"
        raise ConfigError("--turn-s", None, reason, f"Give --turn-s, or see {folder / LOG_FILE}")
    return workload.with_turn(workload.turn_s(read_rates(file), DEVICES))


def measure_rates(workload: Workload, model: Path, folder: Path, timeout_s: float) -> None:
    """Measures in a process of its own, whose group ends with it; writes a reason to stderr where that failed."""
    options = ["--workload", workload.name, "--model", str(model), "--out", str(folder / RATES_FILE)]
    env = BenchPlan(workload, Arm("rates", MODULE, 0), 0, model, folder, {}).environment()
    command = [sys.executable, "-W", "ignore", "-m", MODULE, *options]
    reason = f"see {folder / LOG_FILE}"
    with (folder / LOG_FILE).open("wb") as log:
        popen_options: dict[str, Any] = {
            "env": env,
            "stdout": log,
            "stderr": subprocess.STDOUT,
            "start_new_session": True,
        }
        with managed_process(command, group=True, **popen_options) as process:
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                reason = f"it took more than --timeout {timeout_s:g}; {reason}"
    if process.returncode != 0:
        sys.stderr.write(f"The engine could not be measured alone: {reason}\n")


if __name__ == "__main__":
    sys.exit(main())
