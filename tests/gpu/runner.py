"""Runs the checks in order, each in a process of its own and within its limit, and writes results after each.

`python -m gpu.runner`, which `scripts/gpu_check` starts in the environment that it made. The result file is
`<results>/<card>-<date>.json`: what is known of the machine, and of each check its state (passed, failed, skipped,
cut), reason, seconds and figures. A check that exceeds its limit is cut with all its processes, and keeps what it
reported until then.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from gpu.catalog import Check, find, named
from gpu.place import CPU, CUDA
from seamless_verl.runtime.files import replaced_file

ROOT = Path(__file__).resolve().parents[2]
PASSED, FAILED, SKIPPED, CUT = "passed", "failed", "skipped", "cut"
SLOWER = {CUDA: 1, CPU: 3}  # limits are a card's
GRACE_S, LEAST_S, LOG_END = 15.0, 20.0, 3000  # to end after SIGTERM; left, to begin a check; characters of its log


def card() -> dict[str, Any]:
    """The first card as its driver names it; empty where there is none."""
    fields = ("name", "memory.total", "driver_version")
    query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        line = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return {}
    name, memory, driver = (word.strip() for word in line.split(","))
    return {"card": name, "gigabytes": int(memory) * 2**20 / 10**9, "driver": driver}


def run(check: Check, on: str, limit_s: float, folder: Path) -> dict[str, Any]:
    """Run one check; returns its entry of the result file."""
    lines, log, began = folder / f"{check.name}.jsonl", folder / f"{check.name}.log", time.monotonic()
    path = os.pathsep.join([str(ROOT / "tests"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-W", "ignore", "-m", "gpu.one", check.target, on, str(lines)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=os.environ | {"PYTHONPATH": path}, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(process)
    figures: dict[str, Any] = {}
    for line in lines.read_text().splitlines() if lines.exists() else ():
        figures |= json.loads(line)
    state = CUT if code is None else FAILED if code else SKIPPED if SKIPPED in figures else PASSED
    reason = next((figures.pop(name)["reason"] for name in (SKIPPED, FAILED) if name in figures), None)
    if state == CUT:
        reason = f"its limit of {limit_s:.0f} s was over"
    found: dict[str, Any] = {"name": check.name, "state": state, "seconds": round(time.monotonic() - began, 1)}
    found |= {"reason": reason, "figures": figures}
    if state in (FAILED, CUT):
        found["log"] = log.read_text(errors="replace")[-LOG_END:]
    return found


def end(process: subprocess.Popen[bytes]) -> None:
    """End a check and every process that it started; those of Ray outlive their parent, so they are listed before."""
    try:
        processes = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        processes = []
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for number in (signal.SIGTERM, signal.SIGKILL):
        for child in processes:
            if child.is_running():
                child.send_signal(number)
        _, processes = psutil.wait_procs(processes, timeout=5)


def result_file(folder: Path, on: str, found: dict[str, Any]) -> Path:
    name = re.sub(r"[^A-Za-z0-9]+", "-", found.get("card", on)).strip("-").lower()
    return folder / f"{name}-{datetime.now(UTC):%Y-%m-%d-%H%M%S}.json"


def too_small(check: Check, on: str, found: dict[str, Any]) -> str | None:
    """Why the check cannot run on this card."""
    has = found.get("gigabytes", 0.0)
    if on == CPU or has >= check.gigabytes:
        return None
    return f"needs a card with {check.gigabytes} GB, and this one has {has:.0f} GB"


def run_all(checks: Sequence[Check], on: str, results: Path, minutes: float | None) -> bool:
    """Run them; whether none failed and none was cut."""
    found = card() if on == CUDA else {}
    if on == CUDA and not found:
        sys.stderr.write("no NVIDIA card: nvidia-smi does not answer. On this machine: --platform cpu, or --dry-run\n")
        return False
    results.mkdir(parents=True, exist_ok=True)
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    summary: dict[str, Any] = {**found, "platform": on, "python": platform.python_version(), "checks": []}
    file = result_file(results, on, found)
    with tempfile.TemporaryDirectory(prefix="gpu") as folder:
        for check in checks:
            limit_s = SLOWER[on] * check.limit_s
            left = limit_s if deadline is None else min(limit_s, deadline - time.monotonic())
            reason = too_small(check, on, found)
            if reason is None and left < LEAST_S:
                reason = f"--minutes {minutes:g} were over"
            if reason is None:
                entry = run(check, on, left, Path(folder))
            else:
                entry = {"name": check.name, "state": SKIPPED, "reason": reason}
            summary["checks"].append(entry)
            with replaced_file(file) as temporary:
                temporary.write_text(json.dumps(summary, indent=1))
            sys.stdout.write(f"{check.name}: {entry['state']}{' - ' + entry['reason'] if entry['reason'] else ''}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{file}\n")
    return not any(entry["state"] in (FAILED, CUT) for entry in summary["checks"])


def dry_run(checks: Sequence[Check]) -> bool:
    """List the checks; whether each can be imported here."""
    whole = True
    for check in checks:
        try:
            find(check.target)
            state = ""
        except (ImportError, AttributeError) as error:
            whole, state = False, f"  cannot be imported: {error}"
        sys.stdout.write(f"{check.name:14}{check.limit_s:5} s {check.gigabytes:3} GB  {check.what}{state}\n")
    total = sum(check.limit_s for check in checks)
    sys.stdout.write(f"{len(checks)} checks, at most {total / 60:.0f} minutes\n")
    return whole


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/gpu_check", description="Checks on one NVIDIA card.")
    parser.add_argument("--dry-run", action="store_true", help="list the checks and import them; run none")
    parser.add_argument("--only", default="", help="names of checks, by comma")
    parser.add_argument("--minutes", type=float, help="stop after so many; what was found by then is kept")
    parser.add_argument("--results", type=Path, default=ROOT / "gpu-results", help="folder of the result files")
    parser.add_argument("--platform", choices=[CUDA, CPU], default=CUDA, help="cpu: the same checks, small")
    options = parser.parse_args(arguments)
    try:
        checks = named([name for name in options.only.split(",") if name])
    except LookupError as error:
        sys.stderr.write(f"{error.args[0]}\n")
        return 2
    if options.dry_run:
        return 0 if dry_run(checks) else 1
    return 0 if run_all(checks, options.platform, options.results.resolve(), options.minutes) else 1


if __name__ == "__main__":
    sys.exit(main())
