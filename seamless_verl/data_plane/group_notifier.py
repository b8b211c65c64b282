"""Notifies the trainer of finished groups of sessions, and counts groups that fail one after another."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from seamless_verl.errors import GroupsFailedError

MAX_FAILED_GROUPS = "seamless.gateway.max_failed_groups"
UNSCORED = "reward"  # the kind of a session that failed for its score is no finite number
LIMITED = "sessions/limit_reached"
COUNTED = ("groups/ended", "groups/dropped", "groups/deferred", "sessions/ended", "sessions/failed", LIMITED)
SOON_S = 0.2  # a waiter that needs several groups learns of one that ended so long after it: it may have been dropped


@dataclass(frozen=True)
class GroupEnd:
    """How a group of sessions ended: `error` is why it was dropped, None if it was handed over.

    `failed` of its `sessions` failed, by kind in `kinds`: some were given the failure's reward, others left out;
    `limited` ended at a limit, and are scored. One that was `deferred` neither failed nor succeeded. `cause` is why
    none of its agents succeeded, also of a group that was handed over with the rewards of failures.
    """

    error: str | None = None
    cause: str | None = None
    sessions: int = 0
    failed: int = 0
    kinds: Mapping[str, int] = field(default_factory=dict)
    limited: int = 0
    validation: bool = False
    deferred: bool = False


class GroupNotifier:
    """Counts groups and sessions that ended, and groups that failed since the last success.

    A waiter with a larger count returns at once: it has it from an earlier process.
    """

    def __init__(self, max_failed: int) -> None:
        self.count = self.failed = 0
        self._max_failed, self._last_error = max_failed, ""
        self._counts = Counter(dict.fromkeys(COUNTED, 0))
        self._woken = 0
        self._changed = asyncio.Event()

    def notify(self, end: GroupEnd) -> None:
        """A group has ended. What was deferred, and a validation that went well, say nothing of the training."""
        self._counts["groups/ended"] += 1
        self._counts["groups/dropped"] += end.error is not None and not end.deferred
        self._counts["groups/deferred"] += end.deferred
        self._counts["sessions/ended"] += end.sessions
        self._counts["sessions/failed"] += end.failed
        self._counts[LIMITED] += end.limited
        self._counts.update({f"sessions/failed/{kind}": count for kind, count in end.kinds.items()})
        error = end.error or end.cause
        if not (end.deferred or (end.validation and error is None)):
            self.failed = 0 if error is None else self.failed + 1
            self._last_error = error or self._last_error
        self.count += 1
        self._changed.set()

    def metrics(self) -> dict[str, float]:
        return {name: float(count) for name, count in self._counts.items()}

    def check(self) -> None:
        """Raises GroupsFailedError when too many groups have failed without a success."""
        if self.failed >= self._max_failed:
            raise GroupsFailedError(self.failed, MAX_FAILED_GROUPS, self._last_error)

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
