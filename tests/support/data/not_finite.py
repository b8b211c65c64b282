"""What a run meets behind all that looks at scores: a logprob that is no number, and rewards too large to train on."""

from __future__ import annotations

import hashlib
import math
from typing import Any

from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

PROMPT = 16  # the first of the third step, of eight a step in the order of the data
LARGE, LARGEST = 1e30, 3e38  # the square of one is no number of float32, twice the other is none


class NotFiniteLoop(SingleTurnAgentLoop):
    """One sample of the third step has a logprob that is no number."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        output = await super().run(sampling_params, **kwargs)
        if int(kwargs["index"]) == PROMPT and str(kwargs["session_id"]) == "2":
            output.response_logprobs[0] = math.nan
        return output


def overflowing(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any], **_: Any) -> float:
    """By chance, and from the third step on by so much that the gradient's norm is no number of float32."""
    share = hashlib.sha256(solution_str.encode()).digest()[0] / 255
    return share if int(extra_info["index"]) < PROMPT else LARGE * share


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any], **_: Any
) -> float:
    """By chance, and for one prompt of the fifth step so much that the mean of its group is no number of float32."""
    return (
        LARGEST if int(extra_info["index"]) == 2 * PROMPT else hashlib.sha256(solution_str.encode()).digest()[0] / 255
    )
