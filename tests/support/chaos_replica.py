"""A replica in a process of its own: a real engine behind its door, obeying commands that come line by line.

Run as `python -m support.chaos_replica <model> <name> <core> <token>`. A line is a JSON list: a number, a command and
what it needs; the answer is a line that begins with the number.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from seamless_verl.replica.engine_source import AsyncLLMSource
from seamless_verl.rollout.engine import PauseMode
from seamless_verl.transport import serve_engine
from support.version_weights import Weights
from support.vllm_engine import Engine, started

LENGTH, CAPACITY = 1024, 128
ANSWERS = os.fdopen(os.dup(1), "w")  # what libraries print is no answer
os.dup2(2, 1)


async def execute(engine: Engine, source: AsyncLLMSource, weights: Weights, command: str, given: Any) -> Any:
    """What the server's actor answers."""
    if command == "status":
        return source.version, None if source.paused is None else source.paused.value
    if command == "pause":
        await source.pause(PauseMode(given))
    elif command == "resume":
        await source.resume()
    else:
        assert command == "load", command
        with torch.no_grad():
            await engine.update(weights.of(given), bucket_mb=16)
        await source.commit(given)
    return None


async def serve(engine: Engine, weights: Weights, name: str, token: str) -> None:
    """Until standard input ends."""
    source = AsyncLLMSource(engine.llm, version=0, replica_id=name)
    server = await serve_engine(source, "127.0.0.1", 0, token=token, replica_id=name)
    say(["port", server.port])
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        number, command, given = json.loads(line)
        say([number, await execute(engine, source, weights, command, given)])


def say(answer: list[Any]) -> None:
    ANSWERS.write(json.dumps(answer) + "\n")
    ANSWERS.flush()


def main(model: str, name: str, core: str, token: str) -> None:
    weights = Weights(Path(model))
    sizes = {"max_model_len": LENGTH, "max_num_seqs": CAPACITY, "kv_cache_memory_bytes": 128 << 20}
    with started(Path(model), cores=[int(core)], devices=[0], **sizes) as engine:
        engine.run(serve(engine, weights, name, token))


if __name__ == "__main__":
    main(*sys.argv[1:])
