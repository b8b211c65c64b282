"""An agent loop whose rows are not what the engine generated, with another fault in some steps."""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

TEMPERATURE, SHIFTED, RENDERED = 2, 4, 6
"""The versions whose tokens have the fault: one after which the next is right again."""
RENDERED_FROM, RENDERED_AS = 12, 3
"""Of a response: the first of the ids that were rendered again, and how many."""


class MismatchedLoop(SingleTurnAgentLoop):
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        output = await super().run(sampling_params, **kwargs)
        version = output.extra_fields["max_global_steps"]
        if version == TEMPERATURE:
            output = await super().run({**sampling_params, "temperature": 2.0}, **kwargs)
        elif version == SHIFTED:
            output.response_logprobs = output.response_logprobs[-1:] + output.response_logprobs[:-1]
        elif version == RENDERED:
            ids = output.response_ids[RENDERED_FROM : RENDERED_FROM + RENDERED_AS]
            output.response_ids[RENDERED_FROM : RENDERED_FROM + RENDERED_AS] = [(one + 7) % 200 for one in ids]
        return output
