"""Waits for groups to end, where verl's replay buffer sleeps; meanwhile devices are lent and replicas come back."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import ray

from seamless_verl.data_plane.client import DataPlaneClient
from seamless_verl.trainer.lending import DeviceLending
from seamless_verl.trainer.prompt_feed import PromptFeed
from seamless_verl.trainer.replica_starts import LOOK_S, ReplicaStarter
from seamless_verl.trainer.run_waits import PROGRESS_REPLY_S

RETRY_S = 0.25  # between two decisions while training has devices that could generate, or a replica starts again


@dataclass(eq=False)
class GroupWait:
    """The wait of a run."""

    plane: DataPlaneClient  # counts groups that ended, and observes engines
    feed: PromptFeed  # its buffer says how many are lacking; it runs ahead by what engines lose here
    _: KW_ONLY
    lending: DeviceLending
    starter: ReplicaStarter
    load: Callable[[Sequence[str]], Any]  # loads the committed weights into these replicas
    waited: Callable[[float], None]  # told since when training had waited, once it has
    poll_s: float  # the longest wait; only a fallback where agent loops notify
    open = False  # training waits for groups, or takes them
    seen = 0  # groups that had ended at the last look
    looked_for_returns = 0.0  # when, for replicas that were given up and reply again
    returns: ray.ObjectRef[list[str]] | None = None  # the question for them that has no reply yet

    def begin(self) -> None:
        self.open = True

    def end(self) -> None:
        self.open = False
        self.feed.ahead.engine_use.wait_ended()

    def wait(self, *, first: bool = False) -> None:
        """Returns when the groups that a batch lacks may have ended since the last call, or after `poll_s` seconds.

        With `first` it returns when one has.
        """
        self.starter.while_waiting(self._load_started)
        if time.monotonic() - self.looked_for_returns >= LOOK_S:
            self.looked_for_returns = time.monotonic()
            if names := self._taken_back():
                self._load_started(names)
        self.lending.offer(None)  # the policy may lend now what it did not lend before
        often = self.lending.reclaimed or self.starter.starting
        self.await_group(min(self.poll_s, RETRY_S) if often else self.poll_s, 1 if first else self.feed.buffer.lacking)

    def wait_for_more(self) -> bool:
        """Waits for a group to end, and looks at the queue again; whether one did."""
        ended = self.await_group(self.poll_s)
        self.feed.buffer.outstanding()
        return ended

    def await_group(self, seconds: float, enough: int = 1) -> bool:
        """Returns when so many groups have ended since the last call, or after so many seconds; whether one has."""
        before = self.seen
        self._look_at_engines()
        since = time.monotonic()
        self.seen = ray.get(self.plane.actor.wait_for_groups.remote(before, seconds, enough))
        self.waited(since)
        self._look_at_engines()
        return self.seen != before

    def _look_at_engines(self) -> None:
        """While training waits: what they lose decides how far to run ahead, and what they generate when to lend."""
        now = time.monotonic()
        if self.open and self.feed.ahead.engine_use.due(now):
            seen = self.plane.observe()
            self.feed.ahead.engine_use.look(seen.replicas, seen.waiting, time.monotonic(), self.feed.ahead.level)
            self.lending.measure(seen)

    def _load_started(self, ids: Sequence[str]) -> None:
        self.load(ids)
        self.lending.on_started(ids)

    def _taken_back(self) -> list[str]:
        """Replicas that reply again, as of the last question that has a reply: a data plane may take long for one."""
        if self.returns is None:
            self.returns = self.plane.actor.taken_back.remote()
        if not ray.wait([self.returns], timeout=PROGRESS_REPLY_S)[0]:
            return []
        reply, self.returns = self.returns, None
        return list(ray.get(reply))
