"""What of the calls that run a journal is still to be told.

Owned state: the events of each call that wait, and the appends that are on their way.

Invariants:
- A call's events reach the journal in their order.
- What waits for nobody is told NOTED_S after its first token, or as soon after as the call's last append is done; that
  of many calls at once, for one commit costs as much.
- Who awaits an append hears what became of all earlier ones of its call.
- A call has at most one append on its way that nobody awaits: a journal that falls behind is not given more and more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, Protocol

from seamless_verl.errors import JournalError
from seamless_verl.trajectory.journal import CallStarted, Delta, Event

NOTED_S = 0.05  # of an engine's work that a crash may cost


class Appends(Protocol):
    """All that a recorder asks of a journal."""

    def append(self, *events: Event) -> asyncio.Future[None]: ...


class Untold:
    def __init__(self, journal: Appends) -> None:
        self._journal = journal
        self._events: dict[str, list[Event]] = {}
        self._written: dict[str, asyncio.Future[None]] = {}
        self._telling: asyncio.TimerHandle | None = None
        self._over: JournalError | None = None

    def begin(self, start: CallStarted) -> None:
        """Waits for the call's first token, or its end."""
        self._events[start.call_id] = [start]

    def note(self, tokens: Delta) -> None:
        """Told soon; raises JournalError when the journal takes nothing any more, or refused what it was told."""
        if self._over is not None:
            raise self._over
        if (earlier := self._written.get(tokens.call_id)) is not None and earlier.done():
            earlier.result()
        self._events.setdefault(tokens.call_id, []).append(tokens)
        self._tell_soon()

    def append(self, call_id: str, *events: Event) -> Awaitable[Any]:
        """Told now, after what waits; the result is of all that the call has been told with."""
        written = self._journal.append(*self._events.pop(call_id, ()), *events)
        earlier = self._written.pop(call_id, None)
        return asyncio.gather(earlier, written) if earlier is not None else written

    def _tell_soon(self) -> None:
        if self._telling is None:
            self._telling = asyncio.get_running_loop().call_later(NOTED_S, self._tell)

    def _tell(self) -> None:
        self._telling = None
        waiting = [name for name, events in self._events.items() if isinstance(events[-1], Delta)]
        try:
            for call_id in waiting:
                if self._heard(call_id):
                    self._written[call_id] = self._journal.append(*self._events.pop(call_id))
        except JournalError as error:  # it is over for good, as each call is told with its next piece
            self._over = error
            return
        if any(call_id in self._events for call_id in waiting):
            self._tell_soon()

    def _heard(self, call_id: str) -> bool:
        """Whether the call's last append went well: of one that did not its next piece is to hear, or its end."""
        earlier = self._written.get(call_id)
        return earlier is None or (earlier.done() and not earlier.cancelled() and earlier.exception() is None)
