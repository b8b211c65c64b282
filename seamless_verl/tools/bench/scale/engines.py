"""The stub engines of the scale bench: so many replicas, each at a port of its own, in one process.

`python -m seamless_verl.tools.bench.scale.engines REPLICAS TOKENS_PER_CHUNK SECONDS_PER_CHUNK` prints their ports, and
serves until its standard input closes.
"""

from __future__ import annotations

import sys

from seamless_verl.tools.bench.gateway.arms import announce_ports, run_process, wait_for_parent
from seamless_verl.tools.bench.gateway.load import VOCABULARY
from seamless_verl.tools.bench.gateway.stub_process import TOKEN, replica_name
from seamless_verl.tools.bench.stub_engine import StubEngine
from seamless_verl.transport import serve_engine


async def serve(replicas: int, tokens_per_chunk: int, delay_s: float) -> None:
    servers = []
    for number in range(replicas):
        name = replica_name(number)
        engine = StubEngine(name, tokens_per_chunk=tokens_per_chunk, delay_s=delay_s, vocabulary=VOCABULARY)
        servers.append(await serve_engine(engine, "127.0.0.1", 0, token=TOKEN, replica_id=name))
    announce_ports(*(server.port for server in servers))
    await wait_for_parent()


if __name__ == "__main__":
    run_process(serve(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
