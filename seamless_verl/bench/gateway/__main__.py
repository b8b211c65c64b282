"""python -m seamless_verl.bench.gateway: measure, print a table, write JSON."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

from seamless_verl.bench.gateway.arms import EnginePlace, cores, place, prepare
from seamless_verl.bench.gateway.load import PACES
from seamless_verl.bench.gateway.measuring import Measured, measure, report, table
from seamless_verl.bench.gateway.record import record_cost


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    if args.prepare:
        sys.stdout.write(f"{prepare()}\n")
        return 0
    here, there = cores()
    with place(litellm=not args.no_litellm) as processes:
        allowed = os.sched_getaffinity(0)
        os.sched_setaffinity(0, here)
        try:
            measured = uvloop.run(_measure(processes, args))
        finally:
            os.sched_setaffinity(0, allowed)
    pinning = f"client and engine on core {min(here)}, gateway and proxy on core {min(there)}"
    told = report(measured, record_cost(), pinning=pinning)
    sys.stdout.write(f"{table(measured)}\n{json.dumps({key: told[key] for key in ('times_litellm', 'record')})}\n")
    if args.out:
        args.out.write_text(json.dumps(told, indent=1))
    return 0


async def _measure(processes: EnginePlace, args: argparse.Namespace) -> list[Measured]:
    return [
        one
        for name in args.paces
        for one in await measure(processes, PACES[name], rounds=args.rounds, seconds=args.seconds)
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m seamless_verl.bench.gateway", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each arm, shape and round")
    parser.add_argument("--paces", nargs="+", choices=list(PACES), default=list(PACES), help="of the stub engine")
    parser.add_argument("--no-litellm", action="store_true", help="leave the proxy out, and its installation")
    parser.add_argument("--prepare", action="store_true", help="install the proxy into the cache folder, and end")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    return parser


if __name__ == "__main__":
    sys.exit(main())
