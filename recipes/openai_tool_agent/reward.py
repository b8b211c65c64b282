"""The reward of the tool agent's recipe: for the right answer, and a little for having used the tool.

A session is graded by its whole text from the model's first token on: calls, results, answer.
"""

from __future__ import annotations

import re
from typing import Any

RIGHT, USED = 1.0, 0.1
"""For the right answer; for a wrong one after calls that all had a result."""

NUMBER = re.compile(r"-?[0-9]+")
CALL, RESULT = "<tool_call>", re.compile(r"<tool_response>(.*?)</tool_response>", re.DOTALL)
MARKUP = re.compile(r".*</?tool_(?:call|response)>", re.DOTALL)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, float]:
    """Grades one session; the signature is verl's custom reward function.

    Returns `score` in [0, 1], the reward; `acc`, 1.0 when what follows the last markup has one number, the
    answer, and 0.0 otherwise; and `results`, how many calls had one.
    """
    responses = RESULT.findall(solution_str)
    results = sum(response != "error" for response in responses)
    right = NUMBER.findall(MARKUP.sub("", solution_str, count=1)) == [ground_truth]
    used = 0 < results == len(responses) == solution_str.count(CALL)
    return {"score": RIGHT if right else USED * used, "acc": float(right), "results": float(results)}
