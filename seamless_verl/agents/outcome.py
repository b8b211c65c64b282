"""How one run of an agent ended: exactly one terminal value, plain data that pickles."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from seamless_verl.runtime.scores import score_of

ERROR_CHARS = 4000  # of a traceback's end, which has the error; its beginning is our own code


class AgentStatus(StrEnum):
    """How a run ended."""

    FINISHED = "finished"
    """It ended by itself: returned, or exited with 0."""
    LIMIT = "limit_reached"
    """It ended since its session's turns or tokens, or the model's context, were used up; it is scored as one that
    finished."""
    FAILED = "failed"
    """It raised, or exited with another code, and nothing says that it was not its own failure."""
    TOOL_FAILED = "tool_failed"
    """A tool, its sandbox or another service that it needs failed, or it could not be started."""
    ENGINE_FAILED = "engine_failed"
    """The gateway or an engine failed one of its calls."""
    INVALID_REWARD = "invalid_reward"
    """It ended by itself, and what it gave as its reward is no finite number."""
    TIMED_OUT = "timed_out"
    """It was ended because it had used the time of its own that its limit allows."""
    OUTPUT_LIMIT = "output_limit"
    """It was ended because it wrote more to stdout and stderr than its limit."""
    EXPIRED = "expired"
    """Its session's lifetime was over before it ended."""
    CANCELLED = "cancelled"
    """It was ended, or never started, because whoever asked for it no longer wants it."""


SCORED = frozenset({AgentStatus.FINISHED, AgentStatus.LIMIT})
OWN_FAILURES = frozenset({AgentStatus.FAILED, AgentStatus.OUTPUT_LIMIT})
"""The ends that `failure_reward` is for."""


@dataclass(frozen=True)
class AgentOutcome:
    """The end of one run.

    exit_code: of a command, -n when signal n ended it; None for a callable or a command that never started.
    duration_s: seconds from the start to the end of the agent, without the clean-up.
    paused_s: of a run that was TIMED_OUT, seconds of these that its limit did not count.
    output: the end of a command's stdout and stderr, in order; bounded by `CommandLimits.tail_bytes`.
    reward, reward_info: returned by the agent itself; None and {} when it returned none, or did not finish.
    error: the reason of another status, "" for FINISHED; at most `ERROR_CHARS` characters.
    """

    status: AgentStatus
    duration_s: float = 0.0
    exit_code: int | None = None
    output: str = ""
    reward: float | None = None
    reward_info: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    paused_s: float = 0.0


def reward_of(value: object) -> tuple[float | None, dict[str, Any]]:
    """The reward and the further values that an agent returned: None, a number, or a mapping with the key `reward`.

    Raises ValueError, with the reason, for anything else and for a reward that is no finite number.
    """
    if value is None:
        return None, {}
    if isinstance(value, Mapping):
        if "reward" not in value:
            raise ValueError(f"a reward needs the key 'reward'; there are {sorted(map(str, value))}")
        info = {str(key): item for key, item in value.items() if key != "reward"}
        return (None if value["reward"] is None else score_of(value["reward"])), info
    return score_of(value), {}


def traceback_end(error: BaseException) -> str:
    """The last `ERROR_CHARS` characters of the error's traceback."""
    return "".join(traceback.format_exception(error))[-ERROR_CHARS:]
