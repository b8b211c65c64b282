"""The agent loop and the reward of the built-in workloads: turns of forced length with tool waits between them.

Named in `actor_rollout_ref.rollout.agent.agent_loop_config_path`; verl and our trainer run this very class.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

from seamless_verl.tools.compare.workloads import SAMPLES_FILE, TURN_S, WORKLOADS, ForcedTurn


@dataclass
class Conversation:
    """Tokens so far: mask 1 and a logprob for generated ones, mask 0 for a tool's; seconds by turn."""

    prompt: list[int]
    response: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def add(self, ids: list[int], logprobs: list[float] | None) -> None:
        self.response += ids
        self.mask += [int(logprobs is not None)] * len(ids)
        self.logprobs += [0.0] * len(ids) if logprobs is None else logprobs


class ForcedLengthLoop(AgentLoopBase):  # type: ignore[misc]
    """Generates the turns of a sample with forced lengths.

    `workload` is the name of the workload, `turn_s` how long a tool takes on the mean, in seconds. `SAMPLES_FILE` in
    `trainer.default_local_dir` gets a line for each finished sample.

    `ignore_eos` with `max_tokens` alone forces a length: there are no stop tokens. `min_tokens` would add
    nothing, and verl's client, which lowers `max_tokens` when it resumes a cut call, leaves it as it was, so
    that vLLM would refuse the rest.
    """

    def __init__(self, *args: Any, workload: str, turn_s: float = TURN_S, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.workload = WORKLOADS[workload].with_turn(turn_s)
        self.record = Path(self.config.trainer.default_local_dir) / SAMPLES_FILE

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        place = (int(kwargs["index"]), int(kwargs["session_id"]))
        conversation = Conversation(await self.ct_build_initial_tokens(list(kwargs["raw_prompt"])))
        request, turns = uuid4().hex, self.workload.sample(*place)
        for turn in turns:
            await self.generate(conversation, request, turn, sampling_params)
            if turn.tool_tokens:
                await asyncio.sleep(turn.wait_s)  # the tool's work
                conversation.add(self.tool_result(turn, f"{place}/{len(conversation.response)}"), None)
        self.append_record(place, turns, conversation)
        return AgentLoopOutput(
            prompt_ids=conversation.prompt,
            response_ids=conversation.response,
            response_mask=conversation.mask,
            response_logprobs=conversation.logprobs,
            num_turns=2 * len(turns),
            metrics={"generate_sequences": sum(conversation.seconds), "tool_calls": sum(turn.wait_s for turn in turns)},
            extra_fields={
                "min_global_steps": min(conversation.versions, default=None),
                "max_global_steps": max(conversation.versions, default=None),
                "turn_scores": [],
                "tool_rewards": [],
            },
        )

    async def generate(
        self, conversation: Conversation, request: str, turn: ForcedTurn, sampling: dict[str, Any]
    ) -> None:
        """One turn of exactly its tokens."""
        began = time.monotonic()
        output = await self.server_manager.generate(
            request_id=request,
            prompt_ids=conversation.prompt + conversation.response,
            sampling_params={**sampling, "max_tokens": turn.tokens, "ignore_eos": True},
        )
        conversation.seconds.append(time.monotonic() - began)
        if len(output.token_ids) != turn.tokens or len(output.log_probs or ()) != turn.tokens:
            # Its group then fails, and the report counts what was generated.
            raise RuntimeError(f"{len(output.token_ids)} tokens instead of {turn.tokens}: {output.stop_reason}")
        conversation.add(list(output.token_ids), list(output.log_probs))
        versions = (output.extra_fields.get(name) for name in ("min_global_steps", "max_global_steps", "global_steps"))
        conversation.versions += [version for version in versions if version is not None]

    def tool_result(self, turn: ForcedTurn, seed: str) -> list[int]:
        """A tool's result: random ids, the same at the same place in every arm."""
        return random.Random(seed).choices(range(len(self.tokenizer) // 2), k=turn.tool_tokens)

    def append_record(self, place: tuple[int, int], turns: list[ForcedTurn], conversation: Conversation) -> None:
        """Appends the line of a finished sample to the record."""
        line = {
            "index": place[0],
            "session": place[1],
            "prompt": conversation.prompt,
            "tokens": [turn.tokens for turn in turns],
            "seconds": [round(seconds, 4) for seconds in conversation.seconds],
            "at": time.time(),
        }
        self.record.parent.mkdir(parents=True, exist_ok=True)
        # One write to a file opened for appending: lines of several workers do not mix.
        descriptor = os.open(self.record, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, json.dumps(line).encode() + b"\n")
        finally:
            os.close(descriptor)


def compute_score(data_source: str, solution_str: str, ground_truth: str, **kwargs: Any) -> float:
    """verl's custom reward function: the share of digits among the characters of a response.

    Lengths are forced, so there is nothing to solve; this has a gradient from the first step, and costs as much in
    every arm.
    """
    return sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))
