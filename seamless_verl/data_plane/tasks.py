"""What is said of a runner's task: as its agent loop submits it, as a runner gets it, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from seamless_verl.data_plane.lease_book import LeaseTerms, TaskState


@dataclass(frozen=True)
class TaskOrder:
    """A task as its agent loop submits it: what the agent gets, and what its session is opened with."""

    task_id: str
    task: dict[str, Any]
    opening: dict[str, Any]
    time_limit_s: float
    terms: LeaseTerms


@dataclass(frozen=True)
class TaskResult:
    """How a task ended. It has a session, which is still open, and an outcome if its `state` is DONE."""

    state: TaskState
    attempts: int
    session_id: str = ""
    outcome: dict[str, Any] = field(default_factory=dict)  # the fields of a TaskCompletion
    error: str = ""


@dataclass(frozen=True)
class GivenTask:
    """A task that a runner has, how often it was given, and the session that its agent runs on."""

    order: TaskOrder
    attempts: int
    session_id: str
    key: str
