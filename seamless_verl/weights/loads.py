"""The commit of one version in the background: it is staged and committed, then loaded into the replicas.

The trainer's thread starts it and goes on. Whatever comes next and needs some of it done waits for that: the commit,
all loads, or those of some replicas. An error is raised there, one of a load with the replicas' names. The watchdog
looks for an error as well: where no replica serves, a trainer that waits for groups would not come to the next wait.

Invariants:
- The version is committed first. Then come the actions that wait for that, in their order, and then the rounds, one
  after another; the replicas of a round load together.
- The commit and each round end: done, or with the error that ended it or an earlier one. After an error nothing further
  begins.
- `wait` returns without an error only if all that it waits for is done and nothing has failed so far.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future

from seamless_verl.errors import WeightsNotLoadedError

Load = Callable[[Sequence[str]], None]
Action = Callable[[], None]


class BackgroundLoads:
    """The commit and the loads of `version`; starts them.

    Args:
        rounds: ids of replicas that load together, one round after another.
        load: loads into the replicas of one round; returns when they have loaded, or are STALE or DEAD.
        check: called after the last round; raises if the fleet cannot go on.
        commit: called before the first round; stages and commits the version.
    """

    def __init__(
        self,
        version: int,
        rounds: Sequence[Sequence[str]],
        load: Load,
        check: Action = lambda: None,
        commit: Action = lambda: None,
    ) -> None:
        self.version, self.load, self.check, self.commit = version, load, check, commit
        self.committed, self.checked = Future[None](), Future[None]()
        self.rounds = [(tuple(ids), Future[None]()) for ids in rounds]
        self._actions, self._lock = list[Action](), threading.Lock()
        threading.Thread(target=self._run, name=f"commit of version {version}", daemon=True).start()

    def wait_committed(self) -> None:
        """Returns when the version is committed; raises what ended the staging or the commit."""
        self.committed.result()

    def when_committed(self, action: Action) -> None:
        """Has it called once the version is committed: now, or then in the thread of the loads, which come after it.

        An error of it then ends the commit. Raises what ended the staging or the commit, if it is known by now.
        """
        with self._lock:
            if not self.committed.done():
                self._actions.append(action)
                return
        self.committed.result()
        action()

    @property
    def open(self) -> bool:
        """Whether a round has not ended, or the check after the last."""
        return not self.checked.done()

    def wait(self, ids: Collection[str] | None = None) -> None:
        """Returns when the loads into these replicas have ended; None: into all, and the fleet was checked.

        Raises:
            WeightsNotLoadedError: a load failed with an error that is not the replica's own: those leave it STALE or
                DEAD, and the run goes on.
            ReplicaLostError: no replica serves after the loads; only where all were waited for, or it is known.
            Exception: what ended the staging or the commit.
        """
        if ids is None or self.committed.done():
            self.committed.result()
        for names, ended in self.rounds:
            failed = ended.done() and ended.exception() is not None
            if ids is None or failed or not set(names).isdisjoint(ids):
                ended.result()
        if ids is None or self.checked.done():
            self.checked.result()

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
        """Commits, and does what waited for that; returns the error that ended it."""
        try:
            self.commit()
            while actions := self._take_actions():
                for action in actions:
                    action()
        except BaseException as failed:  # raised to who waits
            with self._lock:
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
