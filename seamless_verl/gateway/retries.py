"""Requests that come again: an SDK repeats one whose reply it did not get.

The repetition joins the calls while they run, or reads again what they gave, instead of sampling anew. It is
known by its mark (a retry count, an idempotency key), never by its content alone: the same prompt sampled twice
is two samples.

Invariants:
- An attempt that broke off is not repeated: its retry is a new request.
- One without an idempotency key is forgotten when its reply has been sent in full, and repeated once.
- One that runs, or would go on if it were asked for again, is never forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from seamless_verl.gateway.refusals import Reason, Refusal
from seamless_verl.gateway.tape import Tape
from seamless_verl.trajectory.journal import CallRecord

KEPT = 8  # attempts of a session that can be repeated; the oldest that has ended goes first


@dataclass(eq=False)
class Attempt:
    """One request that can be repeated, with a tape for each of its calls by their order in it.

    `cuts` are the calls that a restart cut, until a repetition goes on with them; `number` is the request's in its
    session.
    """

    digest: str
    key: str | None
    number: int = 0
    tapes: dict[int, Tape] = field(default_factory=dict)
    cuts: dict[int, CallRecord] = field(default_factory=dict)
    sent: bool = False
    joined: bool = False

    @property
    def repeatable(self) -> bool:
        return bool(self.tapes or self.cuts) and not any(tape.broken for tape in self.tapes.values())

    @property
    def running(self) -> bool:
        return bool(self.cuts) or any(tape.running for tape in self.tapes.values())


class Attempts:
    """The requests of one session that a retry may refer to."""

    def __init__(self) -> None:
        self._known: list[Attempt] = []

    def __len__(self) -> int:
        return len(self._known)

    def repeated(self, digest: str, *, key: str | None, retry: bool) -> Attempt | None:
        """The earlier attempt this request repeats; None for a new one.

        Raises:
            Refusal: the idempotency key came with another request.
        """
        if key is not None:
            found = next((one for one in self._known if one.key == key and one.repeatable), None)
            if found is not None and found.digest != digest:
                raise Refusal(Reason.REUSED_KEY, f"Idempotency-Key {key!r} came with another request. Use a new one")
            return found
        if not retry:
            return None
        same = [one for one in self._known if one.digest == digest and one.repeatable]
        open_ones = [one for one in same if not one.sent and not one.joined]
        # What ended before a restart may have been read in full, what the restart cut was not.
        found = next((one for one in open_ones if one.cuts), None) or next(iter(open_ones), None)
        if found is not None:
            found.joined = True
        return found

    def begin(self, digest: str, key: str | None, number: int = 0) -> Attempt:
        attempt = Attempt(digest, key, number)
        self.restore(attempt)
        return attempt

    def restore(self, attempt: Attempt) -> None:
        """Takes in an attempt as it was, in the order of their beginnings."""
        self._known.append(attempt)
        if len(self._known) > KEPT:
            ended = next((one for one in self._known if not one.running and one is not attempt), None)
            if ended is not None:
                self._known.remove(ended)

    def sent(self, attempt: Attempt) -> None:
        """Its reply has gone out in full."""
        attempt.sent = True
        if attempt.key is None and attempt in self._known:
            self._known.remove(attempt)

    def forget(self, attempt: Attempt) -> None:
        """It came to nothing."""
        if attempt in self._known:
            self._known.remove(attempt)
