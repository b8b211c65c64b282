"""What hangs, and on what: marks of progress, the explanation of a standstill, and a thread that looks."""

from __future__ import annotations

from seamless_verl.resources.watchdog.findings import Finding, Verdict, report
from seamless_verl.resources.watchdog.marks import Key, Watchdog
from seamless_verl.resources.watchdog.stacks import stacks
from seamless_verl.resources.watchdog.watching import Watch, watch

__all__ = ["Finding", "Key", "Verdict", "Watch", "Watchdog", "report", "stacks", "watch"]
