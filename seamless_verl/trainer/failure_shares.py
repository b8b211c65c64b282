"""The shares of sessions that failed over the last steps, by kind: a large one is said once, and may end the run."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping

from seamless_verl.errors import SessionsFailedError

logger = logging.getLogger(__name__)
ENDED, FAILED = "sessions/ended", "sessions/failed/"
STEPS = 5
LOUD = 0.2  # a share that is said


class FailureShares:
    """Reads the run's counts at the end of each step. `most` is the share of a kind above which the run ends, None for
    none. After a restart of the data plane, which counts anew, the steps are counted anew."""

    def __init__(self, most: float | None) -> None:
        self.most = most
        self._counts = deque[Mapping[str, float]]([{}], maxlen=STEPS + 1)
        self._named: set[str] = set()

    def step_ended(self, metrics: Mapping[str, float]) -> None:
        """Raises SessionsFailedError where a kind has more than `most` of the sessions of the last steps."""
        counts = {name: value for name, value in metrics.items() if name == ENDED or name.startswith(FAILED)}
        if counts.get(ENDED, 0.0) < self._counts[-1].get(ENDED, 0.0):
            self._counts = deque([{}], maxlen=STEPS + 1)
        self._counts.append(counts)
        if len(self._counts) <= STEPS:
            return
        first = self._counts[0]
        ended = counts.get(ENDED, 0.0) - first.get(ENDED, 0.0)
        failed = {name.removeprefix(FAILED): counts[name] - first.get(name, 0.0) for name in counts if name != ENDED}
        for kind, count in failed.items():
            if self.most is not None and count > self.most * ended:
                raise SessionsFailedError(kind, int(count), int(ended), STEPS)
            if count > LOUD * ended and kind not in self._named:
                self._named.add(kind)
                logger.warning("%s", SessionsFailedError(kind, int(count), int(ended), STEPS))
