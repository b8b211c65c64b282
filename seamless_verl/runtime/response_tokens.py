"""Response tokens of a logged step: what tokens/s count on the console and in a comparison's report. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real

TOKENS, RESPONSE, PROMPT = "perf/total_num_tokens", "response_length/mean", "prompt_length/mean"
COUNTED = "response tokens that were trained, tools' answers included and prompts not"


def response_tokens(metrics: Mapping[str, object]) -> float:
    """Of a step's metrics as verl logs them: its tokens by the mean lengths of prompts and responses; 0 without."""
    tokens, response, prompt = (_number(metrics.get(name)) for name in (TOKENS, RESPONSE, PROMPT))
    return tokens * response / (response + prompt) if response + prompt else 0.0


def _number(value: object) -> float:
    return float(value) if isinstance(value, Real) else 0.0
