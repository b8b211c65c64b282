"""The device-second ledger: train + rollout + switch + sync + idle = devices x wall time.

Each source process keeps an `Activity`. The report that `take()` returns goes into the `Ledger`, whose counts a `Trace`
writes to a file, so that a run keeps none of them in memory.
"""
