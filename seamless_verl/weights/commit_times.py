"""What one commit of weights took, and what the trainer waited for it.

The trainer goes on while a commit runs in the background. It waits where it comes to something that needs an earlier
part of it: `WeightCommit` counts these waits here, one by one. A wait is divided at the moment at which the version was
committed: what lies before is a wait for the staging, what lies behind one for the loads.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class CommitTimes:
    """Seconds; complete when all loads have ended, and the trainer has made its next optimizer step."""

    waited_s: float = 0.0
    """at the call, for loads of the version before"""
    stage_s: float = 0.0
    """from there until the weights were in the memory of every host"""
    before_commit_s: float = 0.0
    """for which the trainer's thread waited until then: in the call, and at whatever it waited meanwhile, groups too"""
    held_s: float = 0.0
    """for which its workers held their next optimizer step back until the weights were copied"""
    loads_waited_s: float = 0.0
    """for which its thread then waited for loads: before it used devices on which they are, or for all of them"""
    load_s: float = 0.0
    """from the commit until the last replica had loaded"""
    pauses_s: list[float] = field(default_factory=list)
    """for which each replica that loaded staged weights paused; those that had released their memory are not counted,
    since they have not generated for longer"""
    not_loaded: int = 0
    """replicas that could not load, and are STALE or DEAD"""
    began: float = field(default_factory=time.monotonic)
    """when the staging began, by the monotonic clock"""
    committed: float | None = None
    """when the version was committed; None: not yet"""

    @property
    def commit_s(self) -> float:
        """From the begin of the staging until the version was committed."""
        return (time.monotonic() if self.committed is None else self.committed) - self.began

    @property
    def trainer_s(self) -> float:
        """For which the trainer waited until the version was committed."""
        return self.before_commit_s + self.held_s

    @property
    def total_s(self) -> float:
        return self.commit_s + self.load_s

    def trainer_waited(self, since: float, *, for_loads: bool) -> None:
        """The trainer waited from then until now; what of it was after the commit counts only `for_loads`."""
        now = time.monotonic()
        committed = now if self.committed is None else self.committed
        self.before_commit_s += max(0.0, min(now, committed) - max(since, self.began))
        if for_loads:
            self.loads_waited_s += max(0.0, now - max(since, committed))

    def metrics(self) -> dict[str, float]:
        """Known when all loads have ended. `standstill_share` is the mean share of the commit for which a replica
        paused, `trainer_share` that for which the trainer waited until the version was committed."""
        named = {"stage_s": self.stage_s, "trainer_s": self.trainer_s, "loads_waited_s": self.loads_waited_s}
        named |= {"load_s": self.load_s, "standstill_max_s": max(self.pauses_s, default=0.0)}
        named["not_loaded"] = float(self.not_loaded)
        if self.total_s > 0:
            named["trainer_share"] = self.trainer_s / self.total_s
        if self.pauses_s:
            named["standstill_share"] = sum(self.pauses_s) / (len(self.pauses_s) * self.total_s)
        return named
