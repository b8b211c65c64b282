"""How a session is sent to one of verl's reward workers, and how a message names what scores it.

verl's batch of one session is pickled by `torch.save`, for a short reward function a third of what scoring takes; as
arrays it is a fifth of that. Each session is a call of its own: reward managers write into what they get, and one that
takes long holds no other up.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from verl import DataProto

from seamless_verl.errors import shorten

RAISED_CHARS = 160  # of an error's text in a message
PLACE = re.compile(r'File "([^"]+)", line (\d+)')  # in a traceback


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
    """The batch of these arrays, [rows, ...], which are copied: large ones that were sent cannot be written."""
    tensors = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
    return DataProto(TensorDict(tensors, batch_size=rows), others, meta)


class ScoreMethod:
    """In the place of a reward worker's `compute_score`; Ray keeps no record of each call."""

    def __init__(self, method: Any) -> None:
        self.method = method.options(enable_task_events=False)

    def remote(self, data: DataProto) -> Any:
        return self.method.remote(SentSession(data))


def reward_workers(handles: Sequence[Any] | None) -> list[SimpleNamespace] | None:
    """The handles as verl's agent loop workers use them; None where the trainer scores, and not the agent loops."""
    if handles is None:
        return None
    return [SimpleNamespace(compute_score=ScoreMethod(handle.compute_score)) for handle in handles]


def with_arrays(sample: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a prompt as verl can repeat them in an array: nested lists of several lengths as object arrays."""
    return {name: _as_array(value) if isinstance(value, list) else value for name, value in sample.items()}


def _as_array(values: list[Any]) -> Any:
    try:
        np.array(values)
    except ValueError:  # its shape is inhomogeneous
        return np.fromiter(values, dtype=object, count=len(values))
    return values


def scorer_of(reward: Any) -> str:
    """What scores the sessions of a run, by its node `reward`, for a message."""
    if (path := reward.custom_reward_function.path) is not None:
        return f"{reward.custom_reward_function.name} of {path}"
    return f"the reward model {reward.reward_model.model_path}" if reward.reward_model.enable else "verl's own function"


def raised_by(error: BaseException) -> str:
    """What a reward worker raised, and where; Ray's error has the traceback as its text."""
    cause = getattr(error, "cause", None) or error
    text = f"raised {type(cause).__name__}: {shorten(cause, RAISED_CHARS)}"
    if isinstance(cause, KeyError) and cause.args == ("score",):
        text += " (a dict that it returns needs the key 'score')"
    places = PLACE.findall(str(error))
    return f"{text} at {places[-1][0]}:{places[-1][1]}" if places else text
