"""The limits of time of a run and of what waits in it: `seamless.watchdog`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from seamless_verl.runtime.fields import Doc, Positive, PositiveNumber


@dataclass(frozen=True)
class WatchdogConfig:
    """Limits of time, in seconds. What is over one is named in the log, with the chain of what waits for it."""

    transition_s: Annotated[
        Positive,
        Doc(
            "seconds: a replica that takes longer to pause, to load weights or to start is given up, and its calls "
            "continue on others; so is one that serves and gives none of its calls a token for twice as long",
        ),
    ] = 300
    no_progress_s: Annotated[
        Positive,
        Doc("seconds: a run that makes no progress for so long ends, with a report of what did not move"),
    ] = 3600
    group_s: Annotated[
        PositiveNumber | None,
        Doc(
            "seconds: of a group that takes longer, a session whose agent has had no call for as long is ended; "
            "runners have leases instead. `null` waits for as long as the agents' own time limits allow"
        ),
    ] = None

    @property
    def silent_s(self) -> float:
        """Until a replica that gives no tokens, or TransferQueue that takes no rows, is over its limit."""
        return 2.0 * self.transition_s

    @property
    def long_s(self) -> float:
        """Until a commit that does not end, or an actor that does not reply, is over its limit."""
        return self.no_progress_s / 2
