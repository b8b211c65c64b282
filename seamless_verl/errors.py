"""The one tree of exceptions: every error is picklable and is also the stdlib type a caller would expect.

Ray carries exceptions between processes by pickling them, so each class rebuilds from its own
arguments, and its text is complete without its traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

P = ParamSpec("P")


class SeamlessError(Exception):
    """Root of all errors raised on purpose by this package."""


class ConfigError(SeamlessError, ValueError):
    """A user's setting that cannot work: names the key, the value, and the way out."""

    def __init__(self, key: str, value: object, reason: str, way_out: str) -> None:
        super().__init__(key, value, reason, way_out)
        self.key, self.value, self.reason, self.way_out = key, value, reason, way_out

    def __str__(self) -> str:
        return f"{self.key}={self.value!r}: {self.reason}. {self.way_out}"


def refusing(command: Callable[P, int]) -> Callable[P, int]:
    """A command that ends with code 2, and one line on standard error, for a setting that cannot work."""

    @wraps(command)
    def ended(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            return command(*args, **kwargs)
        except ConfigError as error:
            sys.stderr.write(f"{error}\n")
            return 2

    return ended


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


class JournalError(SeamlessError, RuntimeError):
    """The journal cannot keep or give back what it was asked to; nothing of that request was acknowledged."""

    def __init__(self, path: str, reason: str, way_out: str) -> None:
        super().__init__(path, reason, way_out)
        self.path, self.reason, self.way_out = path, reason, way_out

    def __str__(self) -> str:
        return f"journal {self.path}: {self.reason}. {self.way_out}"


class JournalOrderError(SeamlessError, ValueError):
    """An event that cannot follow what is on record; its whole append was refused, the journal goes on."""

    def __init__(self, event: str, subject: str, reason: str) -> None:
        super().__init__(event, subject, reason)
        self.event, self.subject, self.reason = event, subject, reason

    def __str__(self) -> str:
        return f"{self.event} of '{self.subject}': {self.reason}"


class IntegrityError(SeamlessError, AssertionError):
    """A conservation law of our own does not close: two counts of the same thing differ."""

    def __init__(self, law: str, expected: int, found: int) -> None:
        super().__init__(law, expected, found)
        self.law, self.expected, self.found = law, expected, found

    def __str__(self) -> str:
        return f"{self.law}: {self.expected} against {self.found}, a difference of {self.found - self.expected:+d}"


class StandstillError(SeamlessError, TimeoutError):
    """A run made no progress for `limit_s` seconds; the text says what stood still."""

    def __init__(self, found: str, limit_s: float) -> None:
        super().__init__(found, limit_s)
        self.found, self.limit_s = found, limit_s

    def __str__(self) -> str:
        return (
            f"{self.found}\nNothing has moved for seamless.watchdog.no_progress_s={self.limit_s:g} seconds. Where "
            "every process was is in the log above; set a larger value if a step may take so long"
        )


class SessionClosedError(SeamlessError, RuntimeError):
    """A session that has ended was asked to go on, or to end a second time with another reason."""

    def __init__(self, session: str, reason: str, refused: str) -> None:
        super().__init__(session, reason, refused)
        self.session, self.reason, self.refused = session, reason, refused

    def __str__(self) -> str:
        return f"session {self.session} is closed ({self.reason}) and takes no {self.refused}. Open a new session"


class TurnConflictError(SeamlessError, ValueError):
    """Two different turns came under one turn id."""

    def __init__(self, session: str, turn_id: str, difference: str) -> None:
        super().__init__(session, turn_id, difference)
        self.session, self.turn_id, self.difference = session, turn_id, difference

    def __str__(self) -> str:
        return (
            f"session {self.session}: turn_id={self.turn_id!r} is on record with another {self.difference}. "
            "Give each turn its own id; send the same turn again only as it was"
        )


class ReplicaLostError(SeamlessError, ConnectionError):
    """A replica is gone: its process died or its connection broke; what it had streamed stays valid."""

    def __init__(self, replica: str, reason: str) -> None:
        super().__init__(replica, reason)
        self.replica, self.reason = replica, reason

    def __str__(self) -> str:
        return f"replica {self.replica} is lost: {self.reason}"


class ReplicaStateError(SeamlessError, RuntimeError):
    """A replica was asked for a state that cannot follow the one it is in; nothing changed."""

    def __init__(self, replica: str, found: str, wanted: str, legal: str) -> None:
        super().__init__(replica, found, wanted, legal)
        self.replica, self.found, self.wanted, self.legal = replica, found, wanted, legal

    def __str__(self) -> str:
        return f"replica {self.replica} cannot go from {self.found} to {self.wanted}. From {self.found}: {self.legal}"


class WeightsNotLoadedError(SeamlessError, RuntimeError):
    """A replica could not load new weights: its own are the old ones, or of two versions."""

    def __init__(self, replica: str, version: int, reason: str) -> None:
        super().__init__(replica, version, reason)
        self.replica, self.version, self.reason = replica, version, reason

    def __str__(self) -> str:
        return f"replica {self.replica} could not load version {self.version}: {self.reason}"


class ReplicaVersionError(SeamlessError, ValueError):
    """Weights that may not be served: their version is not the committed one."""

    def __init__(self, replica: str, version: int, committed: int) -> None:
        super().__init__(replica, version, committed)
        self.replica, self.version, self.committed = replica, version, committed

    def __str__(self) -> str:
        return (
            f"replica {self.replica}: version={self.version}, but the committed one is {self.committed}. "
            "Commit the version before it is served, or sync the replica again"
        )


class WireError(SeamlessError, ConnectionError):
    """The other end of a connection sent what cannot be understood or accepted; the connection is closed."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(peer, reason)
        self.peer, self.reason = peer, reason

    def __str__(self) -> str:
        return f"connection with {self.peer}: {self.reason}"


class CallError(SeamlessError):
    """Why a call ended as failed; what it had produced stays on record."""

    def __init__(self, call_id: str, reason: str) -> None:
        super().__init__(call_id, reason)
        self.call_id, self.reason = call_id, reason

    def __str__(self) -> str:
        return f"call {self.call_id} failed: {self.reason}"


class CallLossesError(CallError, RuntimeError):
    """One replica after another was lost under the call and none of them produced a token."""


class CallGrammarError(CallError, RuntimeError):
    """The call was cut inside a grammar, and its engines begin one anew with each request."""


class CallRefusedError(CallError, ValueError):
    """The engine would not run the call."""


class GroupsFailedError(SeamlessError, RuntimeError):
    """One group of sessions after another failed, so that nothing is left to be trained."""

    def __init__(self, groups: int, key: str, last: str) -> None:
        super().__init__(groups, key, last)
        self.groups, self.key, self.last = groups, key, last

    def __str__(self) -> str:
        return (
            f"{self.groups} groups failed one after another, and each was replaced by the next. "
            f"Repair what broke the last, or let more fail with {self.key}={2 * self.groups}. The last: {self.last}"
        )


class PlaneFailedError(SeamlessError, RuntimeError):
    """The data plane cannot go on, and starting it again would not help."""

    def __init__(self, plane: str, reason: str) -> None:
        super().__init__(plane, reason)
        self.plane, self.reason = plane, reason

    def __str__(self) -> str:
        return f"{self.plane} has failed: {self.reason}"
