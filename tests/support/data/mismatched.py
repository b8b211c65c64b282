"""An agent loop whose rows are not what the engine generated, with another fault in some steps."""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

TEMPERATURE, SHIFTED, RENDERED = 2, 4, 6
"""The versions whose tokens have the fault: one after which the next is right again."""
PLACE, IDS = 12, [200, 201, 202, 203]
"""Of a response: the first of the ids that were rendered again, and as what: bytes that the reward makes unlikely."""


class MismatchedLoop(SingleTurnAgentLoop):
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        output = await super().run(sampling_params, **kwargs)
        version = output.extra_fields["max_global_steps"]
        if version == TEMPERATURE:
            output = await super().run({**sampling_params, "temperature": 2.0}, **kwargs)
        elif version == SHIFTED:
            output.response_logprobs = output.response_logprobs[-1:] + output.response_logprobs[:-1]
        elif version == RENDERED:
            ids = output.response_ids
            ids[PLACE : PLACE + len(IDS)] = IDS[: len(ids[PLACE:])]
        return output
