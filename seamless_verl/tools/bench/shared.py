"""What benches share: their command lines, and processes on cores of their own that end with them."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, NamedTuple

import psutil

from seamless_verl.errors import ConfigError

PACKAGE = "seamless_verl.tools.bench"
RUN_FAILED = 3  # an exit code
STOP_S = 10.0
SERVING = "serving on"


def bench_parser(name: str, about: str | None) -> argparse.ArgumentParser:
    """The parser of a bench's command, which its module's docstring describes."""
    formatter = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog=f"python -m {PACKAGE}.{name}", description=about, formatter_class=formatter)


def job_parser(name: str, about: str | None) -> argparse.ArgumentParser:
    """That of a bench of a user's own job; read with `parse_intermixed_args`, since overrides may stand anywhere."""
    parser = bench_parser(name, about)
    parser.add_argument("target", nargs="*", help="a recipe or a config file, then overrides KEY=VALUE")
    return parser


def new_folder(out: Path) -> Path:
    """The folder of `--out`, made; ConfigError if there is something in it."""
    out = out.absolute()
    if out.exists() and any(out.iterdir()):
        raise ConfigError("--out", str(out), "is not empty", "Give another folder, or remove it")
    out.mkdir(parents=True, exist_ok=True)
    return out


def numbers(text: str) -> list[int]:
    """Whole numbers between commas; 3e6 is one."""
    return [int(float(part)) for part in text.split(",")]


def split_cores() -> tuple[int, list[int]]:
    """The core of clients and engines, and those of what is measured; the same one on a machine with one core."""
    first, *others = sorted(os.sched_getaffinity(0))
    return first, others or [first]


@contextmanager
def pinned_to(core: int) -> Iterator[None]:
    """Keeps this process on one core while the block lasts."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def cpu_s(processes: Iterable[psutil.Process]) -> float:
    """CPU seconds that processes have used so far."""
    return float(sum(time.user + time.system for time in (process.cpu_times() for process in processes)))


@contextmanager
def child_process(
    command: Sequence[str], *, core: int, env: Mapping[str, str] | None = None, log: IO[str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A child on one core, whose standard input closes with the block, or with this process, however it ends.

    That ends ours. One with a `log` is not ours, and is killed.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=log or subprocess.PIPE,
        stderr=log and subprocess.STDOUT,
        text=True,
        env={**os.environ, **(env or {})},
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        start_new_session=True,
    )
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(0 if log else STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def read_ports(process: subprocess.Popen[str]) -> list[int]:
    """Waits until a child serves, and returns its ports; raises RuntimeError when it ended before."""
    assert process.stdout is not None
    for line in process.stdout:  # libraries may write there, too
        if line.startswith(SERVING):
            return [int(port) for port in line.removeprefix(SERVING).split()]
    raise RuntimeError(f"{process.args!r} ended before it served; what it wrote is above")


class Serving(NamedTuple):
    """A child that serves, and its ports."""

    process: psutil.Process
    ports: list[int]


@contextmanager
def gateways(
    folder: Path, shards: int, replicas: int, tokens_per_chunk: int, delay_s: float
) -> Iterator[tuple[Serving, list[Serving]]]:
    """Stub engines on the first core, and gateways of them on the others; model and journals are in `folder`.

    The engines' last port is the OpenAI API of the first of them.
    """
    from seamless_verl.tiny import make_model

    first, cores = split_cores()
    make_model("nano", 0, folder / "model")
    with ExitStack() as stack:

        def start(core: int, *words: object) -> subprocess.Popen[str]:
            command = [sys.executable, "-m", f"{PACKAGE}.serving", *map(str, words)]
            return stack.enter_context(child_process(command, core=core))

        stubs = start(first, "stub", replicas, tokens_per_chunk, delay_s)
        ports = read_ports(stubs)
        started = [
            start(cores[n % len(cores)], "gateway", folder / "model", folder / f"journal-{n}.sqlite", *ports[:-1])
            for n in range(shards)
        ]
        engines = Serving(psutil.Process(stubs.pid), ports)
        yield engines, [Serving(psutil.Process(one.pid), read_ports(one)) for one in started]


async def serve_until_parent_ends(*ports: int) -> None:
    """Prints the ports of a child, for `read_ports`; returns when its standard input closes."""
    sys.stdout.write(f"{SERVING} {' '.join(map(str, ports))}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
