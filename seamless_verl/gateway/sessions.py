"""The table of a gateway's sessions: keys, states, limits and admission of requests.

Invariants:
- A session is OPEN, then CLOSED or EXPIRED for good; only an OPEN one accepts calls. Only the hash of its key is kept.
- The table's `running` is the sum of its sessions'; neither exceeds its bound, and each admission is returned once.
- A lifetime does not end by a change of the system's time, nor by seconds in which this process stood still. The time
  of day counts once: for what a session that is restored had lived before.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from seamless_verl.errors import IntegrityError
from seamless_verl.gateway.api_errors import ApiError, ErrorCode
from seamless_verl.gateway.session import Session, SessionLimits, SessionSampling, SessionState, hash_key
from seamless_verl.runtime.process import AwakeTime

RETRY_AFTER = 1  # seconds; calls end all the time, so a place is free soon
KEY_BYTES = 32
# Sessions that were dropped, whose agents still get the reason. An agent that outlives its session asks within minutes;
# this is all sessions of a run with 8,192 open calls, and as many before them.
REMEMBERED = 16_384


class SessionTable:
    """All sessions of one gateway; None is no bound.

    `clock` is that of lifetimes, in seconds, by default one that runs while `expire` is called every second or so;
    `time_of_day` gives seconds since the epoch.
    """

    def __init__(
        self,
        *,
        max_running: int | None = None,  # calls of all sessions
        clock: Callable[[], float] | None = None,
        time_of_day: Callable[[], float] = time.time,
    ) -> None:
        self._by_id: dict[str, Session] = {}
        self._by_key: dict[bytes, Session] = {}
        self._forgotten: OrderedDict[bytes, dict[str, Any]] = OrderedDict()  # by key, as `describe` gave them at last
        self._forgotten_keys: dict[str, bytes] = {}  # of these, by id
        self._awake, self._time_of_day = AwakeTime(), time_of_day
        self.clock = clock or self._awake
        self._max_running = max_running
        self._newly_expired: list[Session] = []
        self.paused_s: Callable[[str], float] = lambda session_id: 0.0  # by which a session lives longer, in seconds
        self.running = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Session]:
        return iter(tuple(self._by_id.values()))

    def open(
        self,
        uid: str,
        *,
        limits: SessionLimits | None = None,
        sampling: SessionSampling | None = None,
        metadata: dict[str, Any] | None = None,
        awaited: bool = False,
        session_id: str | None = None,
    ) -> tuple[Session, str]:
        """A new session and its key, which cannot be read again later."""
        key = secrets.token_urlsafe(KEY_BYTES)
        session = Session(
            session_id or secrets.token_hex(8),
            uid,
            hash_key(key),
            limits=limits or SessionLimits(),
            sampling=sampling or SessionSampling(),
            metadata=metadata or {},
            awaited=awaited,
            opened_at=self._time_of_day(),
        )
        self._add(session, 0.0)
        return session, key

    def restore(self, session: Session) -> None:
        """Adds a session that was opened before; raises ValueError when its id or its key is taken."""
        self._add(session, max(0.0, self._time_of_day() - session.opened_at))

    def _add(self, session: Session, age_s: float) -> None:
        if session.session_id in self._by_id or session.key_hash in self._by_key:
            raise ValueError(f"session_id={session.session_id!r} is taken; give each session its own")
        self._awake.beat()  # the first one after a long start would else come later, and no lifetime begin before
        session.quiet_since = self.clock()
        if session.limits.lifetime is not None:
            session.deadline = self.clock() + session.limits.lifetime - age_s
        self._by_id[session.session_id] = session
        self._by_key[session.key_hash] = session

    def quiet_s(self) -> dict[str, float]:
        """Seconds for which the open sessions that have no call have had none in this process, by their ids."""
        now = self.clock()
        quiet = (one for one in self._by_id.values() if one.state is SessionState.OPEN and not one.running)
        return {one.session_id: now - one.quiet_since for one in quiet}

    def get(self, session_id: str) -> Session:
        """The session of that id, in any state; raises ApiError for an unknown one."""
        session = self._by_id.get(session_id)
        if session is None:
            raise ApiError(ErrorCode.NOT_FOUND, f"There is no session {session_id!r}")
        self._expire_if_due(session)
        return session

    def describe(self, session_id: str) -> dict[str, Any]:
        """As the session's `describe`, also for a while after it was dropped; raises ApiError for an unknown one."""
        if (key := self._forgotten_keys.get(session_id)) is not None:
            return self._forgotten[key]
        return self.get(session_id).describe()

    def by_key(self, key: str | None) -> Session:
        """The session of a key, in any state; raises ApiError without a key, or for an unknown one."""
        if not key:
            raise ApiError(
                ErrorCode.MISSING_KEY, "No session key. Send it as a bearer token, as x-api-key, or in the path"
            )
        digest = hash_key(key)
        session = self._by_key.get(digest)
        if session is None and (ended := self._forgotten.get(digest)) is not None:
            message = "Session {session_id} is {state} ({reason}). Open a new one"
            raise ApiError(ErrorCode.CLOSED, message.format(**ended))
        if session is None or not hmac.compare_digest(session.key_hash, digest):
            raise ApiError(ErrorCode.UNKNOWN_KEY, "No session has this key")
        self._expire_if_due(session)
        return session

    def find_by_key(self, key: str) -> Session | None:
        return self._by_key.get(hash_key(key))

    def close(self, session_id: str, reason: str) -> bool:
        """Closes an open session; False when it was closed or had expired already."""
        session = self.get(session_id)
        if session.state is not SessionState.OPEN:
            return False
        session.state, session.reason = SessionState.CLOSED, reason
        return True

    def expire(self) -> list[Session]:
        """Expires the sessions whose lifetime is over; returns all that expired since the last call."""
        self._awake.beat()
        for session in self._by_id.values():
            self._expire_if_due(session)
        expired, self._newly_expired = self._newly_expired, []
        return expired

    def forget(self, session_id: str) -> None:
        """Drops a session that has ended and runs no call; who still uses its key gets the reason for a while."""
        session = self.get(session_id)
        if session.state is SessionState.OPEN or session.running:
            found = f"{session.state} with {session.running} calls"
            raise ValueError(f"session_id={session_id!r} is {found}; close it first")
        del self._by_id[session.session_id], self._by_key[session.key_hash]
        self._forgotten[session.key_hash] = session.describe()
        self._forgotten_keys[session_id] = session.key_hash
        if len(self._forgotten) > REMEMBERED:
            _, oldest = self._forgotten.popitem(last=False)
            del self._forgotten_keys[oldest["session_id"]]

    @contextmanager
    def admit(self, session: Session, calls: int = 1, *, new_turn: bool = True) -> Iterator[None]:
        """Holds places for a request of that many calls; `new_turn` is False for a retry, which costs no turn.

        Raises ApiError: the session has ended, its quota is used up, or too many calls run already.
        """
        self._check_admission(session, calls, new_turn)
        session.requests += 1
        session.turns += new_turn
        session.running += calls
        self.running += calls
        try:
            yield
        finally:
            session.running -= calls
            session.quiet_since = self.clock()
            self.running -= calls

    def require_open(self, session: Session) -> None:
        """Raises ApiError when the session has ended."""
        name = session.session_id
        if session.state is SessionState.EXPIRED:
            raise ApiError(
                ErrorCode.EXPIRED, f"Session {name} has expired after {session.limits.lifetime} s. Open a new one"
            )
        if session.state is SessionState.CLOSED:
            raise ApiError(ErrorCode.CLOSED, f"Session {name} is closed ({session.reason}). Open a new one")

    def check_integrity(self) -> None:
        """Raises IntegrityError unless the sessions' running calls add up to the table's."""
        found = sum(session.running for session in self._by_id.values())
        if found != self.running:
            raise IntegrityError("calls running in all sessions", self.running, found)
        if len(self._by_key) != len(self._by_id):
            raise IntegrityError("keys of sessions", len(self._by_id), len(self._by_key))

    def _expire_if_due(self, session: Session) -> None:
        if session.state is not SessionState.OPEN or session.deadline is None or self.clock() < session.deadline:
            return
        if self.clock() >= session.deadline + self.paused_s(session.session_id):
            session.state, session.reason = SessionState.EXPIRED, "its lifetime is over"
            self._newly_expired.append(session)

    def _check_admission(self, session: Session, calls: int, new_turn: bool) -> None:
        name, limits = session.session_id, session.limits
        self.require_open(session)
        if new_turn and limits.max_turns is not None and session.turns >= limits.max_turns:
            raise ApiError(ErrorCode.QUOTA, f"Session {name} has used its {limits.max_turns} turns")
        if new_turn and session.remaining_tokens == 0:
            raise ApiError(ErrorCode.QUOTA, f"Session {name} has used its {limits.max_tokens} tokens")
        for owner, bound, running in (
            (f"Session {name}", limits.max_concurrent, session.running),
            ("The gateway", self._max_running, self.running),
        ):
            if bound is not None and calls > bound:
                raise ApiError(ErrorCode.UNSUPPORTED, f"{calls} calls in one request: {owner} runs {bound} at most")
            if bound is not None and running + calls > bound:
                message = f"{owner} runs {running} calls of at most {bound}. Try again later"
                raise ApiError(ErrorCode.BUSY, message, retry_after=RETRY_AFTER)
