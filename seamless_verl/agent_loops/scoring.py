"""Sessions are scored by verl's reward workers; those that end together are sent in one call.

verl sends each session by itself, as a batch that is pickled by writing a consolidated TensorDict with `torch.save`.
For a reward function of a few lines that is most of what scoring takes.

Owned state: the sessions that wait to be sent, of one reward worker, in the event loop of an agent loop worker.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import TensorDict
from verl import DataProto
from verl.experimental.reward_loop.reward_loop import RewardLoopWorker

Score: TypeAlias = dict[str, Any]  # `reward_score`, and `reward_extra_info` with what the function returned beside it
TOGETHER_S = 0.002  # from the end of a session to the sending, in which others may end
SLOW_S = 0.02  # of a call, for each of its sessions: then each is sent by itself, and none waits for another's score


class RewardFailedError(RuntimeError):
    """A session could not be scored: the error of the reward function, as text."""


@dataclass(frozen=True)
class ScoringFailure:
    """In the place of a score; an error of a user's reward function need not be one that can be sent."""

    text: str
    trace: str

    @classmethod
    def of(cls, error: BaseException) -> ScoringFailure:
        lines = traceback.format_exception(error)
        return cls(f"{type(error).__name__}: {error}", "".join(lines))

    def error(self) -> RewardFailedError:
        error = RewardFailedError(self.text)
        error.add_note(self.trace)
        return error


class SeamlessRewardLoopWorker(RewardLoopWorker):  # type: ignore[misc]
    """verl's reward worker, which also takes the sessions of one call together."""

    async def score_sessions(self, sessions: Sequence[DataProto]) -> list[Score | ScoringFailure]:
        """What `compute_score` returns for each; they are scored at the same time, and one that fails fails alone."""
        scores = await asyncio.gather(*map(self.compute_score, sessions), return_exceptions=True)
        return [ScoringFailure.of(one) if isinstance(one, BaseException) else one for one in scores]


class SentSession:
    """A DataProto whose tensors are on the CPU; it is pickled as arrays, and read as the DataProto."""

    def __init__(self, data: DataProto) -> None:
        self.data = data

    def __reduce__(self) -> tuple[Callable[..., DataProto], tuple[Any, ...]]:
        tensors = {name: tensor.numpy() for name, tensor in self.data.batch.items()}
        return session_of, (tensors, len(self.data), self.data.non_tensor_batch, self.data.meta_info)


def session_of(
    arrays: Mapping[str, np.ndarray[Any, Any]], rows: int, others: dict[str, Any], meta: dict[str, Any]
) -> DataProto:
    """The batch of these arrays, [rows, ...], which are copied: those that were sent may be read-only."""
    tensors = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
    return DataProto(TensorDict(tensors, batch_size=rows), others, meta)


class ScoreMethod:
    """In the place of a reward worker's `compute_score`."""

    def __init__(self, method: Any) -> None:
        """`method` is the worker's `score_sessions`."""
        self.method = method
        self.waiting: list[tuple[DataProto, asyncio.Future[Score]]] = []
        self.sending = set[asyncio.Task[None]]()
        self.slow = False

    def remote(self, data: DataProto) -> asyncio.Future[Score]:
        """The session's score; raises RewardFailedError, or Ray's error if the worker is gone."""
        loop = asyncio.get_running_loop()
        score: asyncio.Future[Score] = loop.create_future()
        self.waiting.append((data, score))
        if self.slow:
            self._send()
        elif len(self.waiting) == 1:
            loop.call_later(TOGETHER_S, self._send)
        return score

    def _send(self) -> None:
        waiting = [(data, score) for data, score in self.waiting if not score.done()]  # done: its caller was cancelled
        self.waiting = []
        if waiting:
            task = asyncio.create_task(self._score(waiting))
            self.sending.add(task)
            task.add_done_callback(self.sending.discard)

    async def _score(self, waiting: Sequence[tuple[DataProto, asyncio.Future[Score]]]) -> None:
        began = time.monotonic()
        try:
            scores = await self.method.remote([SentSession(data) for data, _ in waiting])
        except Exception as error:  # raised to each caller
            scores = [error] * len(waiting)
        self.slow = time.monotonic() - began > SLOW_S * len(waiting)
        for (_, score), found in zip(waiting, scores, strict=True):
            if score.done():
                continue
            if isinstance(found, ScoringFailure | Exception):
                score.set_exception(found if isinstance(found, Exception) else found.error())
            else:
                score.set_result(found)


class RewardWorker:
    """A handle of a reward worker, as verl's agent loop workers use one."""

    def __init__(self, handle: Any) -> None:
        self.compute_score = ScoreMethod(handle.score_sessions)


def reward_workers(handles: Sequence[Any] | None) -> list[RewardWorker] | None:
    """None where the trainer scores, and not the agent loops."""
    return None if handles is None else [RewardWorker(handle) for handle in handles]
