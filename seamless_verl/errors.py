"""The one tree of exceptions: every error is picklable and is also the stdlib type a caller would expect.

Ray carries exceptions between processes by pickling them, so each class rebuilds from its own
arguments, and its text is complete without its traceback.
"""

from __future__ import annotations


class SeamlessError(Exception):
    """Root of all errors raised on purpose by this package."""


class ConfigError(SeamlessError, ValueError):
    """A user's setting that cannot work: names the key, the value, and the way out."""

    def __init__(self, key: str, value: object, reason: str, way_out: str) -> None:
        super().__init__(key, value, reason, way_out)
        self.key, self.value, self.reason, self.way_out = key, value, reason, way_out

    def __str__(self) -> str:
        return f"{self.key}={self.value!r}: {self.reason}. {self.way_out}"


class HostMovedError(SeamlessError, RuntimeError):
    """A host library no longer has the symbol an adaptation was written against."""

    def __init__(self, adaptation: str, symbol: str, written_for: str, found: str) -> None:
        super().__init__(adaptation, symbol, written_for, found)
        self.adaptation, self.symbol = adaptation, symbol
        self.written_for, self.found = written_for, found

    def __str__(self) -> str:
        return (
            f"adaptation '{self.adaptation}' was written for {self.written_for}, "
            f"but {self.symbol} has moved: {self.found}. "
            f"Install {self.written_for}, or bring the adaptation up to date"
        )
