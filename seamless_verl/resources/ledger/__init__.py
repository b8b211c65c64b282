"""The device-second ledger: train + rollout + switch + sync + idle = devices x wall time.

Each source process keeps an `Activity`. The report that `take()` returns goes into the `Ledger`, whose counts a
`Trace` writes to a file. The view reads that file back, so that a run keeps none of it in memory.
"""

from __future__ import annotations

from seamless_verl.resources.ledger.activity import (
    BUSY,
    SAME_CLOCK,
    Activity,
    ActivityReport,
    ClockOffset,
    DeviceUse,
    NodeActivity,
    UseSpan,
)
from seamless_verl.resources.ledger.ledger import Ledger
from seamless_verl.resources.ledger.report import LedgerReport
from seamless_verl.resources.ledger.trace import END, Trace

__all__ = [
    "BUSY",
    "END",
    "SAME_CLOCK",
    "Activity",
    "ActivityReport",
    "ClockOffset",
    "DeviceUse",
    "Ledger",
    "LedgerReport",
    "NodeActivity",
    "Trace",
    "UseSpan",
]
