"""Where every device-second went: train + rollout + switch + sync + idle = devices x wall time.

Source processes keep an `Activity`; what they `take()` goes into the `Ledger`, which a `Trace` may follow.
The timeline picture (`ledger.drawing`) is read back from the trace, so a run keeps none of it in memory.
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
from seamless_verl.resources.ledger.trace import Trace

__all__ = [
    "BUSY",
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
