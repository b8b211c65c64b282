"""verl's agent loops, of which each says when a group of sessions has ended, so that nobody has to ask."""

from __future__ import annotations

from typing import Any

import ray
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

from seamless_verl.trainer.data_plane.plane import NAME
from seamless_verl.trainer.data_plane.samples import VersionedOutput
from seamless_verl.trainer.host import plain_class


class SeamlessAgentLoopWorker(plain_class(AgentLoopWorkerTQ)):  # type: ignore[misc]
    """verl's worker; rings when a prompt's group is finished or has failed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.plane = ray.get_actor(NAME)

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> None:
        outputs = output if isinstance(output, list) else [output]
        await super()._agent_loop_postprocess([VersionedOutput.of(one) for one in outputs], validate, **kwargs)

    async def _run_prompt(self, *args: Any, **kwargs: Any) -> None:
        await super()._run_prompt(*args, **kwargs)
        await self.plane.ring.remote()


class SeamlessAgentLoopManager(AgentLoopManagerTQ):  # type: ignore[misc]
    """verl's manager, of our workers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(SeamlessAgentLoopWorker)
