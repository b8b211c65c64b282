"""A tool for verl's tool agent loop, and a parser that finds a call of it in whatever was generated.

A run imports it as `actor_rollout_ref.rollout.multi_turn.function_tool_path`, with `ALWAYS` as its `format`: a model of
random weights calls no tool by itself. A reply ends at one token in four.
"""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.function_tool import function_tool

ALWAYS = "always"


@function_tool("now")
def now(zone: str) -> str:
    """The time.

    Args:
        zone: Where.
    """
    return f"12:00 {zone}"


@ToolParser.register(ALWAYS)
class AlwaysCalls(ToolParser):
    """Every reply calls the tool."""

    @property
    def stop_token_ids(self) -> list[int]:
        return list(range(64))

    async def extract_tool_calls(
        self, responses_ids: list[int], tools: list[Any] | None = None
    ) -> tuple[str, list[FunctionCall]]:
        return self.tokenizer.decode(responses_ids), [FunctionCall(name="now", arguments='{"zone": "UTC"}')]
