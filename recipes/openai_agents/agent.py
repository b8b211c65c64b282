"""A triage agent that hands a sum over to a mathematician with a strict tool, on the OpenAI Agents SDK as it is.

Nothing in it depends on training. It finds the model by OPENAI_BASE_URL and OPENAI_API_KEY:

    python agent.py --api responses "What is 37+41?"       or chat; --whole asks for replies that are not streamed
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
from pathlib import Path
from typing import Literal

from agents import (
    Agent,
    AgentsException,
    ModelSettings,
    Runner,
    function_tool,
    set_default_openai_api,
    set_tracing_disabled,
)

MODEL = os.environ.get("OPENAI_MODEL", "policy")
TURNS = 4  # of the model: the hand-off, the tool, the answer, and one more
REPLY_TOKENS = 256


@function_tool(strict_mode=True)
def calculate(left: int, operation: Literal["+", "-"], right: int) -> str:
    """One sum or difference of two whole numbers.

    Args:
        left: the first number
        operation: + or -
        right: the second number
    """
    return str(left + right if operation == "+" else left - right)


def triage() -> Agent[None]:
    """The agent that is asked. Both must use their tool first, so that a model that cannot write yet does, too."""
    settings = ModelSettings(tool_choice="required", parallel_tool_calls=False, max_tokens=REPLY_TOKENS)
    mathematician = Agent(
        name="Mathematician",
        instructions="Use the calculator once, then answer.",
        model=MODEL,
        tools=[calculate],
        model_settings=settings,  # the SDK resets tool_choice when a tool was used
    )
    return Agent(
        name="Triage",
        instructions="Hand sums over to the mathematician.",
        model=MODEL,
        handoffs=[mathematician],
        model_settings=settings,
    )


async def solve(question: str, *, streamed: bool) -> str:
    """The answer, or an empty text when the agents came to none within their turns."""
    try:
        if streamed:
            run = Runner.run_streamed(triage(), question, max_turns=TURNS)
            async for _ in run.stream_events():
                pass
            return str(run.final_output)
        return str((await Runner.run(triage(), question, max_turns=TURNS)).final_output)
    except AgentsException as error:  # too many turns, or a tool that does not exist: the agent's own outcome
        sys.stderr.write(f"no answer: {type(error).__name__}: {error}\n")
        return ""


def reward(answer: str, truth: str) -> float:
    """1 for an answer with the right number; else a tenth of the share of its characters that are plain ASCII."""
    if re.findall(r"-?[0-9]+", answer) == [truth]:
        return 1.0
    return 0.1 * sum(" " <= character <= "~" for character in answer) / max(1, len(answer))


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask the agents.")
    parser.add_argument("question")
    parser.add_argument("--api", choices=["responses", "chat"], default="responses")
    parser.add_argument("--whole", action="store_true", help="ask for whole replies, not for streams")
    parser.add_argument("--truth", help="the right answer: write reward.json")
    options = parser.parse_args()
    set_tracing_disabled(True)  # traces would go to OpenAI
    set_default_openai_api("responses" if options.api == "responses" else "chat_completions")
    answer = asyncio.run(solve(options.question, streamed=not options.whole))
    sys.stdout.write(answer + "\n")
    if options.truth is not None:
        Path("reward.json").write_text(json.dumps({"reward": reward(answer, options.truth)}))


if __name__ == "__main__":
    main()
