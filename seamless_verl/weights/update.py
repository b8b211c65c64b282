"""A version of the weights on its way to the replicas: staged, committed, then loaded into a few of them at a time.

The trainer's thread starts it and goes on. Whatever needs some of it done waits for that, and there an error is raised.
The watchdog looks for an error as well: where no replica serves, a trainer that waits for groups comes to no next wait.

Invariants:
- The version is committed. Then come the actions that wait for that, in their order, and then the rounds, one after
  another; the replicas of a round load together.
- Each of these ends: done, or with the error that ended it or an earlier one. After an error nothing further begins.
- `wait` returns without an error only if all that it waits for is done and nothing has failed so far.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING

from seamless_verl.errors import WeightsNotLoadedError

if TYPE_CHECKING:
    from seamless_verl.weights.seal import Seal

Load = Callable[[Sequence[str]], None]
Action = Callable[[], None]


class Reach(StrEnum):
    """What an update has to have reached before something else may go on."""

    COMMITTED = "committed"
    """it is staged, and the trainer's weights may change; replicas may serve it, and prompts of the next step begin"""
    LOADED = "loaded"
    """replicas have loaded it, or are known as STALE or DEAD"""


@dataclass
class CommitTimes:
    """What an update took, in seconds, and what the trainer waited for it.

    What of a wait lies before the commit is one for the staging, what lies behind it one for the loads. Complete when
    all loads have ended, and the trainer has made its next optimizer step.
    """

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
    seal_s: float = 0.0
    """of the staging, for the digests of the seal; of a host's first rank"""
    sealed_bytes: int = 0
    """of weights that the seal covers, on one host"""
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

    def sealed(self, seals: Sequence[Seal]) -> None:
        """The seals of the version, one of each host on which the trainer has staged it."""
        self.seal_s = max((seal.seconds for seal in seals), default=0.0)
        self.sealed_bytes = max((seal.nbytes for seal in seals), default=0)

    def metrics(self) -> dict[str, float]:
        """Known when all loads have ended. `standstill_share` is the mean share of the commit for which a replica
        paused, `trainer_share` that for which the trainer waited until the version was committed."""
        named = {"stage_s": self.stage_s, "trainer_s": self.trainer_s, "loads_waited_s": self.loads_waited_s}
        named |= {"load_s": self.load_s, "standstill_max_s": max(self.pauses_s, default=0.0)}
        named |= {"not_loaded": float(self.not_loaded)}
        named |= {"seal_s": self.seal_s, "sealed_bytes": float(self.sealed_bytes)}
        if self.total_s > 0:
            named["trainer_share"] = self.trainer_s / self.total_s
        if self.pauses_s:
            named["standstill_share"] = sum(self.pauses_s) / (len(self.pauses_s) * self.total_s)
        return named


@dataclass(eq=False)
class WeightUpdate:
    """The update to `version`; starts it."""

    version: int
    ids: Sequence[Sequence[str]]  # of replicas that load together, one round after another
    load: Load  # into the replicas of one round; returns when they have loaded, or are STALE or DEAD
    check: Action = lambda: None  # called after the last round; raises if the fleet cannot go on
    _: KW_ONLY
    commit: Callable[[], object] = lambda: None  # called first; stages and commits the version
    times: CommitTimes = field(default_factory=CommitTimes)

    def __post_init__(self) -> None:
        self.committed, self.checked = Future[None](), Future[None]()
        self.rounds = [(tuple(ids), Future[None]()) for ids in self.ids]
        self._actions, self._lock = list[Action](), threading.Lock()
        threading.Thread(target=self._run, name=f"update to version {self.version}", daemon=True).start()

    @property
    def open(self) -> bool:
        """Whether a round has not ended, or the check after the last."""
        return not self.checked.done()

    def wait(self, reach: Reach = Reach.LOADED, ids: Collection[str] | None = None) -> None:
        """Returns when it has reached that: LOADED by these replicas; None: by all, and the fleet was checked.

        Raises:
            WeightsNotLoadedError: a load failed with an error that is not the replica's own: those leave it STALE or
                DEAD, and the run goes on.
            ReplicaLostError: no replica serves after the loads; only where all were waited for, or it is known.
            Exception: what ended the commit.
        """
        since = time.monotonic()
        if reach is Reach.LOADED:
            self._wait_loaded(ids)
        else:
            self.committed.result()
        self.times.trainer_waited(since, for_loads=reach is Reach.LOADED)

    def _wait_loaded(self, ids: Collection[str] | None) -> None:
        if ids is None or self.committed.done():
            self.committed.result()
        for names, ended in self.rounds:
            failed = ended.done() and ended.exception() is not None
            if ids is None or failed or not set(names).isdisjoint(ids):
                ended.result()
        if ids is None or self.checked.done():
            self.checked.result()

    def then(self, action: Action) -> None:
        """Has it called once the version is committed: now, or then in the thread of the loads, which come after it.

        An error of it then ends the commit. Raises what ended the commit, if it is known by now.
        """
        with self._lock:
            if not self.committed.done():
                self._actions.append(action)
                return
        self.committed.result()
        action()

    def raise_failed(self) -> None:
        """Raises what `wait` would raise, if it is known by now; returns at once."""
        for ended in (self.committed, *(ended for _, ended in self.rounds), self.checked):
            if ended.done():
                ended.result()

    def _run(self) -> None:
        """Commits, loads and checks; after an error nothing further begins, and all that is left ends with it."""
        loads = [(ended, partial(self._load, ids)) for ids, ended in self.rounds]
        error: BaseException | None = None
        for ended, work in ((self.committed, self._commit), *loads, (self.checked, self.check)):
            if error is None:
                try:
                    work()
                except BaseException as failed:  # raised to who waits
                    error = failed
            with self._lock:
                if error is not None:
                    ended.set_exception(error)
                elif not ended.done():
                    ended.set_result(None)

    def _commit(self) -> None:
        """Commits, and does what waited for that; has ended once nothing waits any more."""
        self.commit()
        while True:
            with self._lock:
                actions, self._actions = self._actions, []
                if not actions:
                    self.committed.set_result(None)
                    return
            for action in actions:
                action()

    def _load(self, ids: Sequence[str]) -> None:
        try:
            self.load(ids)
        except BaseException as failed:  # raised to who waits
            why = f"{type(failed).__name__}: {failed}"
            raise WeightsNotLoadedError(", ".join(ids), self.version, why) from failed
