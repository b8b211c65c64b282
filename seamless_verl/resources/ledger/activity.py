"""What a process does on its devices, noted as it does it.

Invariants:
- A (device, kind) is active while its count is above zero.
- Takes do not overlap and leave no gap: what is active at a take is cut there, and goes on in the next.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from seamless_verl.resources.ledger.spans import BUSY, Kind, Span, Taken

Key = tuple[str, Kind]


class Activity:
    """The notes of one source; any thread may write them, and another may take them.

    Methods speak of all the source's devices unless `devices` names some. `limit` bounds the finished spans
    kept between takes: beyond it the older half is dropped, and its seconds are reported as dropped.
    """

    def __init__(
        self, source: str, devices: Sequence[str], *, limit: int = 100_000, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if not devices or limit < 2:
            raise ValueError(f"source {source!r}: devices={devices!r}, limit={limit!r}: give a device, a limit above 1")
        self.source, self.devices = source, tuple(dict.fromkeys(devices))
        self._limit, self._clock, self._lock = limit, clock, threading.Lock()
        self._all = {kind: [(device, kind) for device in self.devices] for kind in BUSY}
        self._counts: Counter[Key] = Counter()
        self._since: dict[Key, float] = {}
        self._finished: list[Span] = []
        self._dropped: dict[Kind, float] = {}

    @contextmanager
    def doing(self, kind: Kind | str, devices: Iterable[str] | None = None) -> Iterator[None]:
        """A block during which the devices do this; blocks may nest and run in several threads."""
        keys = self._keys(kind, devices)
        self._add(keys, 1)
        try:
            yield
        finally:
            self._add(keys, -1)

    def begin(self, kind: Kind | str, devices: Iterable[str] | None = None) -> None:
        """One more, as of running requests: active while the count is above zero."""
        self._add(self._keys(kind, devices), 1)

    def end(self, kind: Kind | str, devices: Iterable[str] | None = None) -> None:
        """One fewer; raises ValueError when there was none."""
        self._add(self._keys(kind, devices), -1)

    def take(self) -> Taken:
        """What was done since the last take; safe to send to another process."""
        with self._lock:
            now = self._clock()
            opened = [Span(device, kind, since, now, True) for (device, kind), since in self._since.items()]
            spans, dropped = (*self._finished, *opened), self._dropped
            self._since = dict.fromkeys(self._since, now)
            self._finished, self._dropped = [], {}
        return Taken(self.source, now, spans, dropped)

    def _keys(self, kind: Kind | str, devices: Iterable[str] | None) -> list[Key]:
        keys = self._all.get(Kind(kind))
        if keys is None:
            raise ValueError(
                f"source {self.source!r}: kind={kind!r} is what remains; report one of {[*map(str, BUSY)]}"
            )
        if devices is None:
            return keys
        chosen = tuple(dict.fromkeys(devices))
        if not set(chosen) <= set(self.devices):
            raise ValueError(f"source {self.source!r}: devices={chosen!r} are not all among its own, {self.devices!r}")
        return [(device, Kind(kind)) for device in chosen]

    def _add(self, keys: list[Key], step: int) -> None:
        with self._lock:
            for device, kind in keys:
                if self._counts[device, kind] + step < 0:
                    raise ValueError(f"source {self.source!r}: {kind} of {device!r} ends, but it had not begun")
            for key in keys:
                self._counts[key] += step
            self._note(keys)

    def _note(self, keys: list[Key]) -> None:
        """Begins or ends a span where the state changed; the lock is held, so that clock readings are in order."""
        now = self._clock()
        for key in keys:
            active = self._counts[key] > 0
            if active and key not in self._since:
                self._since[key] = now
            elif not active and key in self._since:
                self._finish(Span(*key, self._since.pop(key), now))

    def _finish(self, span: Span) -> None:
        self._finished.append(span)
        if len(self._finished) > self._limit:
            half = len(self._finished) // 2
            for old in self._finished[:half]:
                self._dropped[old.kind] = self._dropped.get(old.kind, 0.0) + old.end - old.start
            del self._finished[:half]
