"""Notifies the trainer of finished groups of sessions, and counts groups that fail one after another."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from seamless_verl.errors import GroupsFailedError

MAX_FAILED_GROUPS = "seamless.gateway.max_failed_groups"
UNSCORED = "reward"  # the kind of a session that failed for its score is no finite number
SOON_S = 0.2  # a waiter that needs several groups learns of one that ended so long after it: it may have been dropped


@dataclass(frozen=True)
class GroupEnd:
    """How a group of sessions ended: `error` is why it was dropped, None if it was handed over.

    `failed` of its `sessions` failed, by kind in `kinds`: some were given the failure's reward, others left out. One
    that was `deferred` neither failed nor succeeded. `cause` is why none of its agents succeeded, also of a group that
    was handed over with the rewards of failures.
    """

    error: str | None = None
    cause: str | None = None
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
    """Counts finished groups. A waiter with a larger count returns at once: it has it from an earlier process."""

    def __init__(self) -> None:
        self.count = 0
        self._woken = 0
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """A group has finished."""
        self.count += 1
        self._changed.set()

    def wake(self) -> None:
        """Makes waiters return without a new group."""
        self._woken += 1
        self._changed.set()

    async def wait(self, seen: int, timeout_s: float, enough: int = 1) -> int:
        """The count, as soon as `enough` groups have finished beyond `seen`, `wake` is called, or time is over.

        That is after `timeout_s` seconds, and `SOON_S` after the first of these groups.
        """
        now, woken = asyncio.get_running_loop().time, self._woken
        end, first = now() + timeout_s, False
        while seen <= self.count < seen + enough and self._woken == woken:
            if self.count > seen and not first:
                end, first = min(end, now() + SOON_S), True
            self._changed.clear()
            try:
                async with asyncio.timeout_at(end):
                    await self._changed.wait()
            except TimeoutError:
                break
        return self.count


class ConsecutiveFailures:
    """Counts the groups that failed since the last success."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.count = 0
        self.last_error = ""

    def add(self, end: GroupEnd) -> None:
        """A group has ended. What was deferred, and a validation that went well, say nothing of the training."""
        error = end.error or end.cause
        if end.deferred or (end.validation and error is None):
            return
        self.count = 0 if error is None else self.count + 1
        self.last_error = error or self.last_error

    def check(self) -> None:
        """Raises an error when too many groups have failed without a success."""
        if self.count >= self.limit:
            raise GroupsFailedError(self.count, MAX_FAILED_GROUPS, self.last_error)
