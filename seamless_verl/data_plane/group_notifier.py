"""Notifies the trainer of finished groups of sessions, and counts groups that fail one after another."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from seamless_verl.errors import GroupsFailedError

MAX_FAILED_GROUPS = "seamless.gateway.max_failed_groups"


@dataclass(frozen=True)
class GroupEnd:
    """How a group of sessions ended: `error` is why it was dropped, None if it was handed over.

    `failed` of its `sessions` failed, by kind in `kinds`: some were given the failure's reward, others left out. One
    that was `deferred` neither failed nor succeeded.
    """

    error: str | None = None
    sessions: int = 0
    failed: int = 0
    kinds: Mapping[str, int] = field(default_factory=dict)
    validation: bool = False
    deferred: bool = False


class GroupCounts:
    """Counts groups and sessions that ended since the data plane was started."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter({"groups/ended": 0, "groups/dropped": 0, "groups/deferred": 0})
        self.counts.update({"sessions/ended": 0, "sessions/failed": 0})

    def add(self, end: GroupEnd) -> None:
        self.counts["groups/ended"] += 1
        self.counts["groups/dropped"] += end.error is not None and not end.deferred
        self.counts["groups/deferred"] += end.deferred
        self.counts["sessions/ended"] += end.sessions
        self.counts["sessions/failed"] += end.failed
        self.counts.update({f"sessions/failed/{kind}": count for kind, count in end.kinds.items()})

    def metrics(self) -> dict[str, float]:
        return {name: float(count) for name, count in self.counts.items()}


class GroupNotifier:
    """Counts finished groups. A waiter with another count returns at once, also with a larger one, which it has from
    an earlier process."""

    def __init__(self) -> None:
        self.count = 0
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """A group has finished."""
        self.count += 1
        self.wake()

    def wake(self) -> None:
        """Makes waiters return without a new group."""
        self._changed.set()

    async def wait(self, seen: int, timeout_s: float) -> int:
        """The count, as soon as it is not `seen`, `wake` is called, or `timeout_s` seconds have passed."""
        if self.count == seen:
            self._changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), timeout_s)
        return self.count


class ConsecutiveFailures:
    """Counts the groups that failed since the last success."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.count = 0
        self.last_error = ""

    def add(self, error: str | None) -> None:
        """A group has ended; `error` is the reason if it failed."""
        self.count = 0 if error is None else self.count + 1
        self.last_error = error or self.last_error

    def check(self) -> None:
        """Raises GroupsFailedError when `limit` groups have failed without a success."""
        if self.count >= self.limit:
            raise GroupsFailedError(self.count, MAX_FAILED_GROUPS, self.last_error)
