"""The limits of time of a run and of what waits in it: `seamless.watchdog`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from seamless_verl.runtime.fields import Doc, Positive, PositiveNumber


@dataclass(frozen=True)
class WaitsConfig:
    """Seconds after which a part of the run that still waits is named in the log, with the chain of what waits for it;
    what can be recovered is, once."""

    token_s: Annotated[
        PositiveNumber | None,
        Doc(
            "seconds: a replica that serves and gives none of its calls a token for so long is given up, if others "
            "serve or it is started again: its calls continue there; `null` waits"
        ),
    ] = 600.0
    group_s: Annotated[
        PositiveNumber | None,
        Doc(
            "seconds: of a group that takes longer, a session whose agent has had no call for as long is ended; the "
            "group is trained without it, or dropped (`seamless.min_sessions`); runners have leases instead. `null` "
            "waits for as long as the agents' own time limits allow"
        ),
    ] = None
    queue_s: Annotated[
        PositiveNumber | None, Doc("seconds: TransferQueue takes longer to take the rows of a group; `null` waits")
    ] = 600.0
    commit_s: Annotated[
        PositiveNumber | None,
        Doc("seconds: a version of the weights takes longer to be staged, sent and loaded; `null` waits"),
    ] = 1800.0
    actor_s: Annotated[
        PositiveNumber | None,
        Doc(
            "seconds: an agent loop worker, a reward worker, a data plane or a part of TransferQueue takes longer to "
            "reply; `null` waits"
        ),
    ] = 1800.0


@dataclass(frozen=True)
class WatchdogConfig:
    """Limits of time, in seconds."""

    transition_s: Annotated[
        Positive,
        Doc(
            "seconds: a replica that takes longer to pause, to load weights or to start is given up, and "
            "its calls continue on others",
        ),
    ] = 300
    no_progress_s: Annotated[
        Positive,
        Doc("seconds: a run that makes no progress for so long ends, with a report of what did not move"),
    ] = 3600
    waits: Annotated[WaitsConfig, Doc("limits of what waits in a run")] = field(default_factory=WaitsConfig)
