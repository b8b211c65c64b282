"""A version of the weights on its way to the replicas: staged, committed, then loaded into a few of them at a time.

`WeightUpdate` is the one handle of it. The trainer's thread starts it and goes on. Whatever comes next and needs some
of it done waits for what it has to have reached: STAGED, COMMITTED, or LOADED by all replicas or by some. An error is
raised there, one of a load with the replicas' names. The watchdog looks for an error as well: where no replica serves,
a trainer that waits for groups would not come to the next wait.

Invariants:
- The version is staged, then committed. Then come the actions that wait for that, in their order, and then the rounds,
  one after another; the replicas of a round load together.
- Each of these ends: done, or with the error that ended it or an earlier one. After an error nothing further begins.
- `wait` returns without an error only if all that it waits for is done and nothing has failed so far.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum

from seamless_verl.errors import WeightsNotLoadedError

Load = Callable[[Sequence[str]], None]
Action = Callable[[], None]


class Reach(StrEnum):
    """What an update has to have reached before something else may go on."""

    STAGED = "staged"
    """the weights are in the memory of every host: those of the trainer may change"""
    COMMITTED = "committed"
    """replicas may serve it, and prompts of the next step begin"""
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


class WeightUpdate:
    """The update to `version`; starts it.

    Args:
        rounds: ids of replicas that load together, one round after another.
        load: loads into the replicas of one round; returns when they have loaded, or are STALE or DEAD.
        check: called after the last round; raises if the fleet cannot go on.
        stage: called first; stages the version.
        commit: called then; commits it.
        times: what it takes.
    """

    def __init__(
        self,
        version: int,
        rounds: Sequence[Sequence[str]],
        load: Load,
        check: Action = lambda: None,
        *,
        stage: Action = lambda: None,
        commit: Action = lambda: None,
        times: CommitTimes | None = None,
    ) -> None:
        self.version, self.load, self.check, self.stage, self.commit = version, load, check, stage, commit
        self.times = times or CommitTimes()
        self.staged, self.committed, self.checked = Future[None](), Future[None](), Future[None]()
        self.rounds = [(tuple(ids), Future[None]()) for ids in rounds]
        self._actions, self._lock = list[Action](), threading.Lock()
        threading.Thread(target=self._run, name=f"update to version {version}", daemon=True).start()

    @property
    def open(self) -> bool:
        """Whether a round has not ended, or the check after the last."""
        return not self.checked.done()

    def wait(self, reach: Reach = Reach.LOADED, ids: Collection[str] | None = None) -> None:
        """Returns when it has reached that: LOADED by these replicas; None: by all, and the fleet was checked.

        What the trainer waits here is counted in `times`.

        Raises:
            WeightsNotLoadedError: a load failed with an error that is not the replica's own: those leave it STALE or
                DEAD, and the run goes on.
            ReplicaLostError: no replica serves after the loads; only where all were waited for, or it is known.
            Exception: what ended the staging or the commit.
        """
        since = time.monotonic()
        if reach is Reach.LOADED:
            self._wait_loaded(ids)
        else:
            (self.staged if reach is Reach.STAGED else self.committed).result()
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

        An error of it then ends the commit. Raises what ended the staging or the commit, if it is known by now.
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
        error = self._commit()
        for ids, ended in self.rounds:
            error = error or self._error_of(ids)
            _end(ended, error)
        if error is None:
            try:
                self.check()
            except BaseException as failed:  # raised to who waits
                error = failed
        _end(self.checked, error)

    def _commit(self) -> BaseException | None:
        """Stages and commits, and does what waited for that; returns the error that ended it."""
        try:
            self.stage()
            self.staged.set_result(None)
            self.commit()
            while actions := self._take_actions():
                for action in actions:
                    action()
        except BaseException as failed:  # raised to who waits
            with self._lock:
                if not self.staged.done():
                    self.staged.set_exception(failed)
                self.committed.set_exception(failed)
            return failed
        return None

    def _take_actions(self) -> list[Action]:
        """The actions that wait; if there are none, the commit has ended."""
        with self._lock:
            actions, self._actions = self._actions, []
            if not actions:
                self.committed.set_result(None)
            return actions

    def _error_of(self, ids: Sequence[str]) -> BaseException | None:
        try:
            self.load(ids)
        except BaseException as failed:  # raised to who waits
            error = WeightsNotLoadedError(", ".join(ids), self.version, f"{type(failed).__name__}: {failed}")
            error.__cause__ = failed
            return error
        return None


def _end(future: Future[None], error: BaseException | None) -> None:
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


def load_rounds(hosts: Sequence[Sequence[str]], at_once: int) -> list[list[str]]:
    """Rounds in which at most `at_once` replicas of each host load; `hosts` has the replicas of each, in their order.

    Hosts do not share memory or buses, so that all of them load together.
    """
    longest = max(map(len, hosts), default=0)
    return [[name for host in hosts for name in host[i : i + at_once]] for i in range(0, longest, at_once)]
