"""Where every device-second went: train + rollout + switch + sync + idle = devices x wall time.

Source processes keep an `Activity`; what they `take()` goes into the `Ledger`, which a `Trace` may follow.
The timeline picture (`ledger.drawing`) is read back from the trace, so a run keeps none of it in memory.
"""

from __future__ import annotations

from seamless_verl.resources.ledger.activity import Activity
from seamless_verl.resources.ledger.books import Ledger
from seamless_verl.resources.ledger.clock import SAME_CLOCK, ClockOffset
from seamless_verl.resources.ledger.report import Report
from seamless_verl.resources.ledger.spans import BUSY, Kind, Span, Taken
from seamless_verl.resources.ledger.trace import Trace

__all__ = ["BUSY", "SAME_CLOCK", "Activity", "ClockOffset", "Kind", "Ledger", "Report", "Span", "Taken", "Trace"]
