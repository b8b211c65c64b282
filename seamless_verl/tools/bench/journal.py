"""Measures how fast a journal is in a given folder: `python -m seamless_verl.tools.bench.journal FOLDER`.

Each writer waits for one durable append before the next, as a gateway does for each call.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from time import perf_counter, process_time

from seamless_verl.journal import CallEnded, CallStarted, ChunkAppended, SessionOpened, SqliteJournal
from seamless_verl.tools.bench.shared import bench_parser
from seamless_verl.trajectory.records import Finish, TokenChunk, logprobs, tokens


async def write(journal: SqliteJournal, name: str, appends: int, size: int) -> list[float]:
    """The seconds of each durable append of one writer."""
    await journal.append(SessionOpened(name, "u", {}, 0.0), CallStarted(name, name, "digest", tokens(range(100))))
    chunk = TokenChunk(tokens(range(size)), logprobs([-0.5] * size), 1, "replica-0")
    waits = []
    for _ in range(appends):
        began = perf_counter()
        await journal.append(ChunkAppended(name, chunk))
        waits.append(perf_counter() - began)
    await journal.append(CallEnded(name, Finish.STOP))
    return waits


async def write_all(journal: SqliteJournal, writers: int, appends: int, size: int) -> list[float]:
    waits = await asyncio.gather(*(write(journal, f"s{number}", appends, size) for number in range(writers)))
    return sorted(wait for of_writer in waits for wait in of_writer)


def measure(folder: Path, writers: int, appends: int, size: int) -> dict[str, float]:
    """Appends a second, their latency in ms, CPU per append in us, and bytes on disk per generated token."""
    with tempfile.TemporaryDirectory(dir=folder) as inside:
        path = Path(inside) / "journal.sqlite"
        with SqliteJournal(path) as journal:
            wall, cpu = perf_counter(), process_time()
            waits = asyncio.run(write_all(journal, writers, appends, size))
            wall, cpu = perf_counter() - wall, process_time() - cpu
        size_bytes = path.stat().st_size
    count = len(waits)
    return {
        "appends_per_s": round(count / wall),
        "median_ms": round(waits[count // 2] * 1e3, 3),
        "p99_ms": round(waits[count * 99 // 100] * 1e3, 3),
        "max_ms": round(waits[-1] * 1e3, 3),
        "cpu_us": round(cpu / count * 1e6, 1),
        "bytes_per_token": round(size_bytes / (count * size), 1),
    }


def main() -> None:
    parser = bench_parser("journal", __doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--writers", type=int, default=32)
    parser.add_argument("--appends", type=int, default=1000, help="by each writer")
    parser.add_argument("--size", type=int, default=1, help="tokens in one append")
    args = parser.parse_args()
    sys.stdout.write(json.dumps(measure(args.folder, args.writers, args.appends, args.size)) + "\n")


if __name__ == "__main__":
    main()
