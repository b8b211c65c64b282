"""Loads of one committed version into the replicas, which go on while the trainer computes.

The trainer's thread starts them and goes on. Whatever comes next and needs them done waits for them: all of them, or
those of some replicas. An error is raised there, with the replicas' names. The watchdog looks for an error as well:
where no replica serves, a trainer that waits for groups would not come to the next wait.

Invariants:
- The rounds run one after another, in their order; the replicas of a round load together.
- Each round ends: done, or with the error that ended it or an earlier one. After an error no further round begins.
- `wait` returns without an error only if all rounds that it waits for are done and no round has failed so far.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future

from seamless_verl.errors import WeightsNotLoadedError

Load = Callable[[Sequence[str]], None]


class BackgroundLoads:
    """The loads of `version`; starts them.

    Args:
        rounds: ids of replicas that load together, one round after another.
        load: loads into the replicas of one round; returns when they have loaded, or are STALE or DEAD.
        check: called after the last round; raises if the fleet cannot go on.
    """

    def __init__(
        self, version: int, rounds: Sequence[Sequence[str]], load: Load, check: Callable[[], None] = lambda: None
    ) -> None:
        self.version, self.load, self.check = version, load, check
        self.rounds = [(tuple(ids), Future[None]()) for ids in rounds]
        self.checked = Future[None]()
        threading.Thread(target=self._run, name=f"loads of version {version}", daemon=True).start()

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
        """
        for names, ended in self.rounds:
            failed = ended.done() and ended.exception() is not None
            if ids is None or failed or not set(names).isdisjoint(ids):
                ended.result()
        if ids is None or self.checked.done():
            self.checked.result()

    def raise_failed(self) -> None:
        """Raises what `wait` would raise, if it is known by now; returns at once."""
        for ended in (*(ended for _, ended in self.rounds), self.checked):
            if ended.done():
                ended.result()

    def _run(self) -> None:
        error: BaseException | None = None
        for ids, ended in self.rounds:
            error = error or self._error_of(ids)
            _end(ended, error)
        if error is None:
            try:
                self.check()
            except BaseException as failed:  # raised to who waits
                error = failed
        _end(self.checked, error)

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
