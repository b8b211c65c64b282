"""Ledgers with plain times, and sources whose clock is turned by hand."""

from __future__ import annotations

from seamless_verl.resources.ledger import Activity, Kind, Ledger, Span, Taken


class Clock:
    """A clock that stands until it is set."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def span(kind: str, start: float, end: float, device: str = "d0", *, open: bool = False) -> Span:
    return Span(device, Kind(kind), start, end, open)


def took(*spans: Span, until: float | None = None, source: str = "s") -> Taken:
    return Taken(source, max((s.end for s in spans), default=0.0) if until is None else until, spans)


def ledger(devices: int = 1, **settings: object) -> Ledger:
    return Ledger([f"d{n}" for n in range(devices)], 0.0, **settings)  # type: ignore[arg-type]


def activity(clock: Clock, *devices: str, source: str = "s", **settings: int) -> Activity:
    return Activity(source, devices or ("d0",), clock=clock, **settings)


def seconds(books: Ledger, device: str = "d0") -> dict[str, float]:
    """The kinds that have any, by name."""
    return {str(kind): value for kind, value in books.seconds[device].items() if value}
