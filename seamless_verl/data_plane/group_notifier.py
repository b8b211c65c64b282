"""Who hears that a group of sessions has ended, and how many have failed one after another."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from seamless_verl.errors import GroupsFailedError

MOST = "seamless.gateway.max_failed_groups"


class GroupNotifier:
    """Counts; whoever has heard less is woken, and so is whoever heard more, from a bell that is gone."""

    def __init__(self) -> None:
        self.count = 0
        self._rung = asyncio.Event()

    def ring(self) -> None:
        self.count += 1
        self.wake()

    def wake(self) -> None:
        """Without a count: let those who wait look again."""
        self._rung.set()

    async def wait(self, heard: int, timeout: float) -> int:
        """The count, as soon as it is not `heard`, somebody is woken, or `timeout` seconds have passed."""
        if self.count == heard:
            self._rung.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._rung.wait(), timeout)
        return self.count


class Failures:
    """Groups that failed since the last one that did not."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.row = 0
        self.last = ""

    def note(self, failure: str | None) -> None:
        """A group has ended; `failure` is why it failed, if it did."""
        self.row = 0 if failure is None else self.row + 1
        self.last = failure or self.last

    def check(self) -> None:
        """Raises GroupsFailedError when as many as may be have failed without a success."""
        if self.row >= self.most:
            raise GroupsFailedError(self.row, MOST, self.last)
