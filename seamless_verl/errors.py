"""The tree of exceptions: one root; every error is picklable and also the stdlib type that a caller would expect.

Ray carries exceptions between processes by pickling them. So each class is rebuilt from its own arguments, and its
text is complete without its traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from typing import ClassVar, ParamSpec, dataclass_transform

P = ParamSpec("P")


@dataclass_transform(eq_default=False)
class SeamlessError(Exception):
    """Root of all errors raised on purpose by this package: the fields of each are its arguments, `TEXT` its text."""

    TEXT: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        if "__init__" not in vars(cls):
            dataclass(eq=False, repr=False)(cls)
            for field in fields(cls):  # type: ignore[arg-type]
                if field.name in vars(cls):  # a default: of an error from another process Ray looks there first
                    delattr(cls, field.name)

    def __post_init__(self) -> None:
        self.args = tuple(getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]

    def __str__(self) -> str:
        return self.TEXT.format(**vars(self))


class ConfigError(SeamlessError, ValueError):
    """A user's setting that cannot work: names the key, the value, the reason and the way out."""

    key: str
    value: object
    reason: str
    way_out: str
    TEXT = "{key}={value!r}: {reason}. {way_out}"

    @property
    def mistakes(self) -> tuple[ConfigError, ...]:
        """Every mistake by itself: this error, or those that ConfigErrors carries."""
        return (self,)


class WordError(ConfigError):
    """A word of the command line that is no setting: the word is the key, and there is no value."""

    TEXT = "{key}: {reason}. {way_out}"


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

    adaptation: str
    symbol: str
    written_for: str
    found: str
    TEXT = (
        "adaptation '{adaptation}' was written for {written_for}, but {symbol} has moved: {found}. "
        "Install {written_for}, or bring the adaptation up to date"
    )


class JournalError(SeamlessError, RuntimeError):
    """The journal could not write or read what was asked; nothing of that request was acknowledged."""

    path: str
    reason: str
    way_out: str
    TEXT = "journal {path}: {reason}. {way_out}"


class JournalOrderError(SeamlessError, ValueError):
    """An event that cannot follow the recorded ones; its whole append was refused, and the journal stays usable.

    `stage` is that of the session that it is about, empty where it is not open or being handed over.
    """

    event: str
    subject: str
    reason: str
    stage: str = ""
    TEXT = "{event} of '{subject}': {reason}"


class IntegrityError(SeamlessError, AssertionError):
    """A conservation law does not hold: two counts of the same thing differ."""

    law: str
    expected: int
    found: int

    def __str__(self) -> str:
        return f"{self.law}: {self.expected} against {self.found}, a difference of {self.found - self.expected:+d}"


class NoProgressError(SeamlessError, TimeoutError):
    """A run made no progress for `limit_s` seconds: `no_progress_s`, or a part's limit, which follows from `setting`.

    `found` says what did not move.
    """

    found: str
    limit_s: float
    setting: str = ""

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

    found: str
    way_out: str
    TEXT = "{found}. {way_out}"


class CheckpointError(SeamlessError, OSError):
    """The checkpoint of a step could not be saved, for a `reason` of the disk; the one before it stays."""

    step: int
    folder: str
    reason: str
    TEXT = (
        "the checkpoint of step {step} could not be saved in {folder}: {reason}. Repair that, or "
        "set trainer.default_local_dir to a folder on another disk. trainer.max_actor_ckpt_to_keep=1 keeps one only"
    )


class ActorLostError(SeamlessError, RuntimeError):
    """Actors died without which a run cannot go on; `actors` names them."""

    actors: str
    reason: str
    TEXT = "{actors} died: {reason}"


class SessionStuckError(SeamlessError, TimeoutError):
    """A session was ended since its group had waited for too long; `reason` says for what."""

    reason: str
    TEXT = "{reason}"


class SessionClosedError(SeamlessError, RuntimeError):
    """A closed session was asked for another turn, or to close again with another reason."""

    session: str
    reason: str
    refused: str
    TEXT = "session {session} is closed ({reason}) and takes no {refused}. Open a new session"


class TurnConflictError(SeamlessError, ValueError):
    """Two different turns have the same turn id."""

    session: str
    turn_id: str
    difference: str
    TEXT = (
        "session {session}: turn_id={turn_id!r} is on record with another {difference}. "
        "Give each turn its own id; repeat a turn only unchanged"
    )


class ReplicaLostError(SeamlessError, ConnectionError):
    """A replica is lost: its process died or its connection broke; the tokens that it streamed stay valid."""

    replica: str
    reason: str
    TEXT = "replica {replica} is lost: {reason}"


class EngineStartError(SeamlessError, RuntimeError):
    """vLLM did not start an engine, with the line that it wrote of it."""

    cause: str
    log: str
    TEXT = (
        "vLLM did not start: {cause}\nIts settings are those of actor_rollout_ref.rollout, and of engine_kwargs.vllm"
        " there. All it wrote is in {log} among Ray's logs"
    )


class ReplicaStateError(SeamlessError, RuntimeError):
    """A replica was asked for a state that cannot follow its present one; nothing changed."""

    replica: str
    found: str
    wanted: str
    legal: str
    TEXT = "replica {replica} cannot go from {found} to {wanted}. From {found}: {legal}"


class WeightsNotLoadedError(SeamlessError, RuntimeError):
    """A replica could not load new weights; it has the old ones, or a mix of both versions."""

    replica: str
    version: int
    reason: str
    TEXT = "replica {replica} could not load version {version}: {reason}"


class SealError(SeamlessError, RuntimeError):
    """A replica's memory, or what it maps, does not have what the trainer had; `since` is what fitted last."""

    version: int
    shard: int
    found: str
    reason: str
    since: str
    TEXT = "version {version}, shard {shard}: {found}: {reason}. What fitted last: {since}"


class ReplicaVersionError(SeamlessError, ValueError):
    """A replica has weights that it may not serve: their version is not the committed one."""

    replica: str
    version: int
    committed: int
    TEXT = (
        "replica {replica}: version={version}, but the committed one is {committed}. "
        "Commit the version before it is served, or sync the replica again"
    )


class WireError(SeamlessError, ConnectionError):
    """The peer of a connection sent what cannot be decoded or accepted; the connection is closed."""

    peer: str
    reason: str
    TEXT = "connection with {peer}: {reason}"


class CallError(SeamlessError):
    """A call failed; the tokens that it had generated stay on record."""

    call_id: str
    reason: str
    TEXT = "call {call_id} failed: {reason}"


class CallLossesError(CallError, RuntimeError):
    """The call lost one replica after another, and none of them generated a token."""


class CallGrammarError(CallError, RuntimeError):
    """The call was cut inside a grammar, which engines start over with each request."""


class CallRefusedError(CallError, ValueError):
    """The engine refused the call."""


class OutsideApiError(SeamlessError, RuntimeError):
    """A run refused what a program outside of it asked for; `retry_after` in seconds where waiting helps."""

    status: int
    code: str
    message: str
    retry_after: float | None = None
    TEXT = "{status} {code}: {message}"


class LeaseError(SeamlessError, ValueError):
    """A runner's lease has ended, or there never was one: nothing of its request was done.

    `how` is one word or two: expired, done, given back, refused, withdrawn or unknown.
    """

    lease_id: str
    how: str
    reason: str
    TEXT = "lease {lease_id} is {how}: {reason}. Lease another task"


class GroupsFailedError(SeamlessError, RuntimeError):
    """Too many groups of sessions failed in a row, without one in which an agent succeeded."""

    groups: int
    key: str
    last: str

    def __str__(self) -> str:
        return (
            f"{self.groups} groups failed one after another. Repair the last failure, or allow more with "
            f"{self.key}={2 * self.groups}. The last: {self.last}"
        )


class SessionsFailedError(SeamlessError, RuntimeError):
    """A large share of the sessions of the last steps failed in one way."""

    kind: str
    failed: int
    ended: int
    steps: int
    TEXT = (
        "{failed} of the {ended} sessions of the last {steps} steps ended as {kind}. The log has the first error of "
        "each kind, `seamless-verl trajectories ls JOURNAL` every session with its reason; docs/agents.md says under "
        "How an agent ends what each kind means"
    )


class GroupDroppedError(SeamlessError, RuntimeError):
    """Too few sessions of a group can be trained; verl replaces its prompt by another."""

    uid: str
    trainable: int
    total: int
    needed: int
    last: str
    TEXT = (
        "prompt {uid} is dropped: {trainable} of its {total} sessions can be trained, and "
        "seamless.min_sessions needs {needed}. The last failure: {last}"
    )


class PlaneFailedError(SeamlessError, RuntimeError):
    """The data plane failed in a way that starting it again would not repair."""

    plane: str
    reason: str
    TEXT = "{plane} has failed: {reason}"
