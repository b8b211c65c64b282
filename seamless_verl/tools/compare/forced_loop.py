"""The agent loop and the reward of the built-in workloads: turns of forced length with tool waits between them.

Named in `actor_rollout_ref.rollout.agent.agent_loop_config_path`; verl and our trainer run this very class.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

from seamless_verl.tools.compare.workloads import SAMPLES_FILE, TURN_S, WORKLOADS


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
        self.system_prompt = self.drawn_ids(workload, self.workload.system_tokens)

    def drawn_ids(self, seed: str, count: int) -> list[int]:
        return random.Random(seed).choices(range(len(self.tokenizer) // 2), k=count)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        index, session = int(kwargs["index"]), int(kwargs["session_id"])
        prompt = self.system_prompt + await self.ct_build_initial_tokens(list(kwargs["raw_prompt"]))
        request, turns = uuid4().hex, self.workload.sample(index, session)
        # By token: mask 1 and a logprob for a generated one, mask 0 for a tool's; by turn: seconds.
        ids, mask, logprobs, seconds, versions = list[int](), list[int](), list[float](), list[float](), list[int]()
        for turn in turns:
            began = time.monotonic()
            sampling = {**sampling_params, "max_tokens": turn.tokens, "ignore_eos": True}
            output = await self.server_manager.generate(
                request_id=request, prompt_ids=prompt + ids, sampling_params=sampling
            )
            seconds.append(time.monotonic() - began)
            if len(output.token_ids) != turn.tokens or len(output.log_probs or ()) != turn.tokens:
                # Its group then fails, and the report counts what was generated.
                raise RuntimeError(f"{len(output.token_ids)} tokens instead of {turn.tokens}: {output.stop_reason}")
            await asyncio.sleep(turn.wait_s)  # the tool's work
            # A tool's result is random, and the same at the same place in every arm.
            draw = f"{(index, session)}/{len(ids) + turn.tokens}"
            result = self.drawn_ids(draw, turn.tool_tokens)
            ids += [*output.token_ids, *result]
            mask += [1] * turn.tokens + [0] * turn.tool_tokens
            logprobs += [*output.log_probs, *[0.0] * turn.tool_tokens]
            found = (output.extra_fields.get(f"{which}global_steps") for which in ("min_", "max_", ""))
            versions += [version for version in found if version is not None]
        line = {"index": index, "session": session, "prompt": prompt, "tokens": [turn.tokens for turn in turns]}
        self.append_record(line | {"seconds": [round(one, 4) for one in seconds], "at": time.time()})
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=ids,
            response_mask=mask,
            response_logprobs=logprobs,
            num_turns=2 * len(turns),
            metrics={"generate_sequences": sum(seconds), "tool_calls": sum(turn.wait_s for turn in turns)},
            extra_fields={
                "min_global_steps": min(versions, default=None),
                "max_global_steps": max(versions, default=None),
                "turn_scores": [],
                "tool_rewards": [],
            },
        )

    def append_record(self, line: dict[str, Any]) -> None:
        """In one write to a file opened for appending: lines of several workers do not mix."""
        self.record.parent.mkdir(parents=True, exist_ok=True)
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
