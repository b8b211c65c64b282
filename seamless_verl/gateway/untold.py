"""What of the calls that run a journal is still to be told.

Owned state: the events of each call that wait, and the appends that are on their way.

Invariants:
- A call's events reach the journal in their order.
- What waits for nobody is told within NOTED_S of its first token, that of many calls at once: one commit costs as much.
- Who awaits an append hears what became of all earlier ones of its call.
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
        self._written: dict[str, list[asyncio.Future[None]]] = {}
        self._telling: asyncio.TimerHandle | None = None
        self._over: JournalError | None = None

    def begin(self, start: CallStarted) -> None:
        """Waits for the call's first token, or its end."""
        self._events[start.call_id] = [start]

    def note(self, tokens: Delta) -> None:
        """Told soon; raises JournalError when the journal takes nothing any more."""
        if self._over is not None:
            raise self._over
        self._events.setdefault(tokens.call_id, []).append(tokens)
        if self._telling is None:
            self._telling = asyncio.get_running_loop().call_later(NOTED_S, self._tell)

    def append(self, call_id: str, *events: Event) -> Awaitable[Any]:
        """Told now, after what waits; the result is of all that the call has been told with."""
        written = self._journal.append(*self._events.pop(call_id, ()), *events)
        earlier = self._written.pop(call_id, None)
        return asyncio.gather(*earlier, written) if earlier else written

    def _tell(self) -> None:
        self._telling = None
        try:
            for call_id in [name for name, events in self._events.items() if isinstance(events[-1], Delta)]:
                written = self._journal.append(*self._events.pop(call_id))
                self._written[call_id] = [*filter(_matters, self._written.get(call_id, ())), written]
        except JournalError as error:  # it is over for good, as each call is told with its next piece
            self._over = error


def _matters(written: asyncio.Future[None]) -> bool:
    return not written.done() or written.cancelled() or written.exception() is not None
