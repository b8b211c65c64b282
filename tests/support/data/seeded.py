"""What makes two runs of verl's `sync` trainer the same to the bit: seeds by place, and a fixed batch order.

Loaded into plain verl through its own configuration: an agent loop whose sampling seed is a function
of (run seed, step, prompt, sample), so that neither arrival order nor an engine's restart matters, and
a replay buffer that hands out a batch in the order of the data set, not in that of completion.
"""

from __future__ import annotations

import hashlib
from typing import Any

from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


class SeededAgentLoop(SingleTurnAgentLoop):
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        place = (self.rollout_config.seed, int(kwargs["global_steps"]), int(kwargs["index"]), kwargs["session_id"])
        seed = int.from_bytes(hashlib.sha256(repr(place).encode()).digest()[:4], "big") >> 1
        return await super().run({**sampling_params, "seed": seed}, **kwargs)


class CanonicalReplayBuffer(ReplayBuffer):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(poll_interval=0.1, **kwargs)

    def _materialize_batch(self, partition_id: str, uids: list[str], snapshot: dict[str, dict]) -> Any:
        order = {uid: i for i, uid in enumerate(self.prompt_global_steps[partition_id])}

        def place(key: str) -> tuple[int, int, int]:
            uid, session, index = key.rsplit("_", 2)
            return order[uid], int(session), int(index)

        keys = sorted((key for key in snapshot if key.rsplit("_", 2)[0] in order), key=place)
        return super()._materialize_batch(partition_id, uids, {key: snapshot[key] for key in keys})
