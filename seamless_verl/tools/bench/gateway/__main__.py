"""The command `python -m seamless_verl.tools.bench.gateway`: measures, prints a table, writes JSON."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

from seamless_verl.tools.bench.gateway.arms import BenchProcesses, install_litellm, pinned_cores, start_processes
from seamless_verl.tools.bench.gateway.load import PACINGS
from seamless_verl.tools.bench.gateway.measuring import Measurement, make_report, measure, report_table


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    if args.prepare:
        sys.stdout.write(f"{install_litellm()}\n")
        return 0
    client_cores, gateway_cores = pinned_cores()
    with start_processes(litellm=not args.no_litellm) as processes:
        allowed = os.sched_getaffinity(0)
        os.sched_setaffinity(0, client_cores)
        try:
            measurements = uvloop.run(_measure(processes, args))
        finally:
            os.sched_setaffinity(0, allowed)
    pinning = f"client and engine on core {min(client_cores)}, gateway and proxy on core {min(gateway_cores)}"
    report = make_report(measurements, pinning=pinning)
    summary = json.dumps({"times_litellm": report["times_litellm"]})
    sys.stdout.write(f"{report_table(measurements)}\n{summary}\n")
    if args.out:
        args.out.write_text(json.dumps(report, indent=1))
    return 0


async def _measure(processes: BenchProcesses, args: argparse.Namespace) -> list[Measurement]:
    return [
        measurement
        for name in args.pacings
        for measurement in await measure(processes, PACINGS[name], rounds=args.rounds, seconds=args.seconds)
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m seamless_verl.tools.bench.gateway", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each arm, shape and round")
    parser.add_argument("--pacings", nargs="+", choices=list(PACINGS), default=list(PACINGS), help="of the stub engine")
    parser.add_argument("--no-litellm", action="store_true", help="leave the proxy out, and its installation")
    parser.add_argument("--prepare", action="store_true", help="install the proxy into the cache folder, and end")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    return parser


if __name__ == "__main__":
    sys.exit(main())
