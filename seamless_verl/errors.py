"""The tree of exceptions: one root; every error is picklable and also the stdlib type that a caller would expect.

Ray carries exceptions between processes by pickling them. So each class is rebuilt from its own arguments, and its
text is complete without its traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import wraps
from typing import ParamSpec

P = ParamSpec("P")


class SeamlessError(Exception):
    """Root of all errors raised on purpose by this package."""


class ConfigError(SeamlessError, ValueError):
    """A user's setting that cannot work: names the key, the value, the reason and the way out."""

    def __init__(self, key: str, value: object, reason: str, way_out: str) -> None:
        super().__init__(key, value, reason, way_out)
        self.key, self.value, self.reason, self.way_out = key, value, reason, way_out

    def __str__(self) -> str:
        return f"{self.key}={self.value!r}: {self.reason}. {self.way_out}"

    @property
    def mistakes(self) -> tuple[ConfigError, ...]:
        """Every mistake by itself: this error, or those that ConfigErrors carries."""
        return (self,)


class WordError(ConfigError):
    """A word of the command line that is no setting: the word is the key, and there is no value."""

    def __str__(self) -> str:
        return f"{self.key}: {self.reason}. {self.way_out}"


class ConfigErrors(ConfigError):
    """Several settings that cannot work: it is the first, and its text lists all, one a line."""

    def __init__(self, first: ConfigError, *others: ConfigError) -> None:
        super().__init__(first.key, first.value, first.reason, first.way_out)
        self.args = (first, *others)

    def __str__(self) -> str:
        return "\n".join(str(mistake) for mistake in self.mistakes)

    @property
    def mistakes(self) -> tuple[ConfigError, ...]:
        return self.args


def refuse(mistakes: Sequence[ConfigError]) -> None:
    """Raises what was found: nothing, the one ConfigError, or ConfigErrors."""
    if mistakes:
        raise mistakes[0] if len(mistakes) == 1 else ConfigErrors(*mistakes)


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    """Nothing to do."""
    NOTE = "note"
    """Not in order, or not known, and no trouble for a run here."""
    WARNING = "warning"
    """A run works, but slower, or only in some layouts."""
    ERROR = "error"
    """A run fails, or would not be the run that is meant."""


@dataclass(frozen=True)
class Finding:
    """What was found of a subject without starting anything; `way_out` is empty for what is in order, and only then."""

    subject: str
    level: Level
    text: str
    way_out: str = ""

    def __post_init__(self) -> None:
        assert bool(self.way_out) == (self.level is not Level.OK), self

    def __str__(self) -> str:
        return f"{self.level}: {self.subject}: {self.text}. {self.way_out}".removesuffix(". ")

    @classmethod
    def of(cls, subject: str, mistake: ConfigError, level: Level = Level.ERROR) -> Finding:
        """A setting that cannot work, or that may not."""
        return cls(subject, level, f"{mistake.key}={mistake.value!r}: {mistake.reason}", mistake.way_out)


LINE_CHARS = 500


def shorten(text: object, limit: int = LINE_CHARS) -> str:
    """The text in one line of at most `limit` characters: its beginning, and its end, where a traceback says what."""
    line = " ".join(str(text).split())
    return line if len(line) <= limit else f"{line[: limit // 3]} ... {line[-(limit - limit // 3 - 5) :]}"


def exits_on_config_error(command: Callable[P, int]) -> Callable[P, int]:
    """Make a command end with code 2 and the error's text on standard error when a setting cannot work."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            return command(*args, **kwargs)
        except ConfigError as error:
            sys.stderr.write(f"{error}\n")
            return 2

    return run


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
    """The journal could not write or read what was asked; nothing of that request was acknowledged."""

    def __init__(self, path: str, reason: str, way_out: str) -> None:
        super().__init__(path, reason, way_out)
        self.path, self.reason, self.way_out = path, reason, way_out

    def __str__(self) -> str:
        return f"journal {self.path}: {self.reason}. {self.way_out}"


class JournalOrderError(SeamlessError, ValueError):
    """An event that cannot follow the recorded ones; its whole append was refused, and the journal stays usable.

    `stage` is that of the session that it is about, empty where it is not open or being handed over.
    """

    def __init__(self, event: str, subject: str, reason: str, stage: str = "") -> None:
        super().__init__(event, subject, reason, stage)
        self.event, self.subject, self.reason, self.stage = event, subject, reason, stage

    def __str__(self) -> str:
        return f"{self.event} of '{self.subject}': {self.reason}"


class IntegrityError(SeamlessError, AssertionError):
    """A conservation law does not hold: two counts of the same thing differ."""

    def __init__(self, law: str, expected: int, found: int) -> None:
        super().__init__(law, expected, found)
        self.law, self.expected, self.found = law, expected, found

    def __str__(self) -> str:
        return f"{self.law}: {self.expected} against {self.found}, a difference of {self.found - self.expected:+d}"


class NoProgressError(SeamlessError, TimeoutError):
    """A run made no progress for `limit_s` seconds: `no_progress_s`, or a part's limit, which follows from `setting`.

    `found` says what did not move.
    """

    def __init__(self, found: str, limit_s: float, setting: str = "") -> None:
        super().__init__(found, limit_s, setting)
        self.found, self.limit_s, self.setting = found, limit_s, setting

    def __str__(self) -> str:
        limit, whose = f"seamless.watchdog.no_progress_s={self.limit_s:g} seconds", "every process"
        if self.setting:
            limit, whose = f"{self.limit_s:g} seconds ({self.setting})", "the processes concerned"
        return (
            f"{self.found}\nNothing has moved for {limit}. The log above has the stacks of {whose}; set a larger value "
            "if a step may take so long"
        )


class NotFiniteError(SeamlessError, ArithmeticError):
    """Numbers that are not finite would become weights, or are weights of a checkpoint; `found` says which."""

    def __init__(self, found: str, way_out: str) -> None:
        super().__init__(found, way_out)
        self.found, self.way_out = found, way_out

    def __str__(self) -> str:
        return f"{self.found}. {self.way_out}"


class CheckpointError(SeamlessError, OSError):
    """The checkpoint of a step could not be saved, for a `reason` of the disk; the one before it stays."""

    def __init__(self, step: int, folder: str, reason: str) -> None:
        super().__init__(step, folder, reason)
        self.step, self.folder, self.reason = step, folder, reason

    def __str__(self) -> str:
        return (
            f"the checkpoint of step {self.step} could not be saved in {self.folder}: {self.reason}. Repair that, or "
            "set trainer.default_local_dir to a folder on another disk. trainer.max_actor_ckpt_to_keep=1 keeps one only"
        )


class ActorLostError(SeamlessError, RuntimeError):
    """Actors died without which a run cannot go on; `actors` names them."""

    def __init__(self, actors: str, reason: str) -> None:
        super().__init__(actors, reason)
        self.actors, self.reason = actors, reason

    def __str__(self) -> str:
        return f"{self.actors} died: {self.reason}"


class SessionStuckError(SeamlessError, TimeoutError):
    """A session was ended since its group had waited for too long; `reason` says for what."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class SessionClosedError(SeamlessError, RuntimeError):
    """A closed session was asked for another turn, or to close again with another reason."""

    def __init__(self, session: str, reason: str, refused: str) -> None:
        super().__init__(session, reason, refused)
        self.session, self.reason, self.refused = session, reason, refused

    def __str__(self) -> str:
        return f"session {self.session} is closed ({self.reason}) and takes no {self.refused}. Open a new session"


class TurnConflictError(SeamlessError, ValueError):
    """Two different turns have the same turn id."""

    def __init__(self, session: str, turn_id: str, difference: str) -> None:
        super().__init__(session, turn_id, difference)
        self.session, self.turn_id, self.difference = session, turn_id, difference

    def __str__(self) -> str:
        return (
            f"session {self.session}: turn_id={self.turn_id!r} is on record with another {self.difference}. "
            "Give each turn its own id; repeat a turn only unchanged"
        )


class ReplicaLostError(SeamlessError, ConnectionError):
    """A replica is lost: its process died or its connection broke; the tokens that it streamed stay valid."""

    def __init__(self, replica: str, reason: str) -> None:
        super().__init__(replica, reason)
        self.replica, self.reason = replica, reason

    def __str__(self) -> str:
        return f"replica {self.replica} is lost: {self.reason}"


class ReplicaStateError(SeamlessError, RuntimeError):
    """A replica was asked for a state that cannot follow its present one; nothing changed."""

    def __init__(self, replica: str, found: str, wanted: str, legal: str) -> None:
        super().__init__(replica, found, wanted, legal)
        self.replica, self.found, self.wanted, self.legal = replica, found, wanted, legal

    def __str__(self) -> str:
        return f"replica {self.replica} cannot go from {self.found} to {self.wanted}. From {self.found}: {self.legal}"


class WeightsNotLoadedError(SeamlessError, RuntimeError):
    """A replica could not load new weights; it has the old ones, or a mix of both versions."""

    def __init__(self, replica: str, version: int, reason: str) -> None:
        super().__init__(replica, version, reason)
        self.replica, self.version, self.reason = replica, version, reason

    def __str__(self) -> str:
        return f"replica {self.replica} could not load version {self.version}: {self.reason}"


class ReplicaVersionError(SeamlessError, ValueError):
    """A replica has weights that it may not serve: their version is not the committed one."""

    def __init__(self, replica: str, version: int, committed: int) -> None:
        super().__init__(replica, version, committed)
        self.replica, self.version, self.committed = replica, version, committed

    def __str__(self) -> str:
        return (
            f"replica {self.replica}: version={self.version}, but the committed one is {self.committed}. "
            "Commit the version before it is served, or sync the replica again"
        )


class WireError(SeamlessError, ConnectionError):
    """The peer of a connection sent what cannot be decoded or accepted; the connection is closed."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(peer, reason)
        self.peer, self.reason = peer, reason

    def __str__(self) -> str:
        return f"connection with {self.peer}: {self.reason}"


class CallError(SeamlessError):
    """A call failed; the tokens that it had generated stay on record."""

    def __init__(self, call_id: str, reason: str) -> None:
        super().__init__(call_id, reason)
        self.call_id, self.reason = call_id, reason

    def __str__(self) -> str:
        return f"call {self.call_id} failed: {self.reason}"


class CallLossesError(CallError, RuntimeError):
    """The call lost one replica after another, and none of them generated a token."""


class CallGrammarError(CallError, RuntimeError):
    """The call was cut inside a grammar, which engines start over with each request."""


class CallRefusedError(CallError, ValueError):
    """The engine refused the call."""


class OutsideApiError(SeamlessError, RuntimeError):
    """A run refused what a program outside of it asked for; `retry_after` in seconds where waiting helps."""

    def __init__(self, status: int, code: str, message: str, retry_after: float | None = None) -> None:
        super().__init__(status, code, message, retry_after)
        self.status, self.code, self.message, self.retry_after = status, code, message, retry_after

    def __str__(self) -> str:
        return f"{self.status} {self.code}: {self.message}"


class LeaseError(SeamlessError, ValueError):
    """A runner's lease has ended, or there never was one: nothing of its request was done.

    `how` is one word or two: expired, done, given back, refused, withdrawn or unknown.
    """

    def __init__(self, lease_id: str, how: str, reason: str) -> None:
        super().__init__(lease_id, how, reason)
        self.lease_id, self.how, self.reason = lease_id, how, reason

    def __str__(self) -> str:
        return f"lease {self.lease_id} is {self.how}: {self.reason}. Lease another task"


class GroupsFailedError(SeamlessError, RuntimeError):
    """Too many groups of sessions failed in a row, without one in which an agent succeeded."""

    def __init__(self, groups: int, key: str, last: str) -> None:
        super().__init__(groups, key, last)
        self.groups, self.key, self.last = groups, key, last

    def __str__(self) -> str:
        return (
            f"{self.groups} groups failed one after another. Repair the last failure, or allow more with "
            f"{self.key}={2 * self.groups}. The last: {self.last}"
        )


class GroupDroppedError(SeamlessError, RuntimeError):
    """Too few sessions of a group can be trained; verl replaces its prompt by another."""

    def __init__(self, uid: str, trainable: int, total: int, needed: int, last: str) -> None:
        super().__init__(uid, trainable, total, needed, last)
        self.uid, self.trainable, self.total, self.needed, self.last = uid, trainable, total, needed, last

    def __str__(self) -> str:
        return (
            f"prompt {self.uid} is dropped: {self.trainable} of its {self.total} sessions can be trained, and "
            f"seamless.min_sessions needs {self.needed}. The last failure: {self.last}"
        )


class PlaneFailedError(SeamlessError, RuntimeError):
    """The data plane failed in a way that starting it again would not repair."""

    def __init__(self, plane: str, reason: str) -> None:
        super().__init__(plane, reason)
        self.plane, self.reason = plane, reason

    def __str__(self) -> str:
        return f"{self.plane} has failed: {self.reason}"
