"""Waits for groups to end, where verl's replay buffer sleeps; meanwhile devices are lent and replicas come back.

Owned state: the count of finished groups at the last look, and the question for replicas that reply again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import ray

from seamless_verl.data_plane.client import DataPlaneClient
from seamless_verl.trainer.lending import DeviceLending
from seamless_verl.trainer.prompt_feed import RunAhead
from seamless_verl.trainer.replay_buffer import SeamlessReplayBuffer
from seamless_verl.trainer.replica_starts import LOOK_S, ReplicaStarter
from seamless_verl.trainer.run_waits import PROGRESS_REPLY_S

RETRY_S = 0.25  # between two decisions while training has devices that could generate, or a replica starts again


class GroupWait:
    """The wait of a run.

    Args:
        plane: counts groups that ended, and observes engines.
        buffer: says how many groups are lacking.
        ahead: measures what engines lose while training waits.
        lending: lends devices, where a wait makes that worth it.
        starter: connects replicas that have started again.
        load: loads the committed weights into these replicas.
        waited: told since when training had waited, once it has.
        poll_s: the longest wait; only a fallback where agent loops notify.
    """

    def __init__(
        self,
        plane: DataPlaneClient,
        buffer: SeamlessReplayBuffer,
        *,
        ahead: RunAhead,
        lending: DeviceLending,
        starter: ReplicaStarter,
        load: Callable[[Sequence[str]], Any],
        waited: Callable[[float], None],
        poll_s: float,
    ) -> None:
        self.plane, self.buffer, self.ahead, self.lending, self.starter = plane, buffer, ahead, lending, starter
        self.load, self.waited, self.poll_s = load, waited, poll_s
        self.open = False  # training waits for groups, or takes them
        self.seen = 0  # groups that had ended at the last look
        self.looked_for_returns = 0.0  # when, for replicas that were given up and reply again
        self.returns: ray.ObjectRef[list[str]] | None = None  # the question for them that has no reply yet

    def begin(self) -> None:
        self.open = True

    def end(self) -> None:
        self.open = False
        self.ahead.engine_use.wait_ended()

    def wait(self) -> None:
        """Returns when the groups that a batch lacks may have ended since the last call, or after `poll_s` seconds."""
        self.starter.while_waiting(self._load_started)
        if time.monotonic() - self.looked_for_returns >= LOOK_S:
            self.looked_for_returns = time.monotonic()
            if names := self._taken_back():
                self._load_started(names)
        self.lending.offer(None)  # the policy may lend now what it did not lend before
        often = self.lending.reclaimed or self.starter.starting
        self.await_group(min(self.poll_s, RETRY_S) if often else self.poll_s, self.buffer.lacking)

    def wait_for_more(self) -> bool:
        """Waits for a group to end, and looks at the queue again; whether one did."""
        ended = self.await_group(self.poll_s)
        self.buffer.outstanding()
        return ended

    def await_group(self, seconds: float, enough: int = 1) -> bool:
        """Returns when so many groups have ended since the last call, or after so many seconds; whether one has.

        Of several the first is known a fifth of a second after its end at the latest.
        """
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
        if self.open and self.ahead.engine_use.due(now):
            seen = self.plane.observe()
            self.ahead.engine_use.look(seen.replicas, seen.waiting, time.monotonic(), self.ahead.level)
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
