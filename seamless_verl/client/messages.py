"""The messages between a run and programs outside of it, and the version of the protocol that runners speak."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

PROTOCOL = 2
"""Of runners. A runner of another version is refused."""
WAIT_S = 20.0  # a request for a task is answered so late at most
RunStatus = Literal[
    "finished",
    "limit_reached",
    "failed",
    "tool_failed",
    "engine_failed",
    "invalid_reward",
    "timed_out",
    "output_limit",
    "expired",
]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]


class OpenedSession(msgspec.Struct, frozen=True):
    """A session that was opened. `base_url` ends in `/v1`, as OpenAI's SDK wants it, `anthropic_base_url` does not."""

    session_id: str
    key: str
    base_url: str
    anthropic_base_url: str


class SessionView(msgspec.Struct, frozen=True):
    """A session as it is now; `tokens` generated so far, `running` calls, `reason` why it was closed."""

    session_id: str
    uid: str
    state: str
    reason: str
    turns: int
    tokens: int
    running: int
    metadata: dict[str, Any]


class LeaseRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A runner asks for a task of one of its agents, and waits up to `wait_s` seconds for one.

    With a `lease_id` of its own, a random one for each request, it can return a lease whose reply it did not wait for.
    """

    protocol: int
    runner: Name
    agents: Annotated[list[Name], msgspec.Meta(min_length=1)]
    wait_s: Annotated[float, msgspec.Meta(ge=0)] = WAIT_S
    lease_id: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{32})?$")] = ""


class TaskLease(msgspec.Struct, frozen=True):
    """A task with its session, leased to a runner that gives a sign of life at least every `lease_s` seconds.

    The session's base URL is `<address>/s/<key>`, at the address by which the runner reached the run.
    """

    lease_id: str
    task_id: str
    agent: str
    attempt: int
    task: dict[str, Any]
    session_id: str
    key: str
    time_limit_s: float
    lease_s: float


class LeaseReply(msgspec.Struct, frozen=True):
    """The reply to a LeaseRequest; `lease` is None when there is no task."""

    lease: TaskLease | None


class Heartbeat(msgspec.Struct, frozen=True):
    """The reply to a sign of life: the lease lasts `lease_s` seconds from now on.

    `paused_s`: seconds in which calls of the session waited, which the agent's time limit does not count.
    """

    lease_s: float
    paused_s: float


class TaskCompletion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the agent's run ended; `reward` is a finite number or None, for what was posted or the reward manager."""

    status: RunStatus
    reward: Any = None
    reward_info: dict[str, Any] = {}
    error: str = ""
    duration_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class TaskReturn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A runner returns a task: it stops, or, with `refused`, cannot do it, and the attempt counts."""

    reason: str
    refused: bool = False
