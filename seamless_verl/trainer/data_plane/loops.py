"""verl's agent loops, of which each says when a group of sessions has ended, so that nobody has to ask.

They are stopped before the plane they call.
"""

from __future__ import annotations

import asyncio
import logging
from contextvars import ContextVar
from typing import Any

import ray
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

from seamless_verl.trainer.data_plane.agent_loop import SessionAgentLoop
from seamless_verl.trainer.data_plane.answers import answered
from seamless_verl.trainer.data_plane.samples import SessionOutputs, VersionedOutput
from seamless_verl.trainer.data_plane.shards import NAME
from seamless_verl.trainer.host import plain_class

logger = logging.getLogger(__name__)
LONGEST = 4000  # characters of an error that are passed on; all of it is in the log
STOP_S = 30.0  # for agents to end that are told to
FAILED: ContextVar[list[str]] = ContextVar("failed")
"""What went wrong in the group that this task, or one it started, belongs to."""


class SeamlessAgentLoopWorker(plain_class(AgentLoopWorkerTQ)):  # type: ignore[misc]
    """verl's worker; rings when a prompt's group is finished or has failed, and says which sessions are kept."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.plane = ray.get_actor(NAME)
        SessionAgentLoop.confirmed = True

    async def _run_prompt(self, *args: Any, **kwargs: Any) -> None:
        errors: list[str] = []
        FAILED.set(errors)
        await super()._run_prompt(*args, **kwargs)
        await answered(self.plane.ring.remote(errors[-1][-LONGEST:] if errors else None))

    async def stop(self) -> None:
        """End the groups that still run; then none of their calls is open, unless an agent does not end."""
        running = set(self.background_tasks)
        for task in running:
            task.cancel()
        left = (await asyncio.wait(running, timeout=STOP_S))[1] if running else running
        if left:
            logger.warning("%s of %s groups did not end within %s s", len(left), len(running), STOP_S)

    async def _run_agent_loop(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return await super()._run_agent_loop(*args, **kwargs)
        except Exception as error:
            FAILED.get().append(f"{type(error).__name__}: {error}")
            raise

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> None:
        outputs = output if isinstance(output, list) else [output]
        await super()._agent_loop_postprocess([VersionedOutput.of(one) for one in outputs], validate, **kwargs)
        if isinstance(output, SessionOutputs):
            await output.handed()


class SeamlessAgentLoopManager(AgentLoopManagerTQ):  # type: ignore[misc]
    """verl's manager, of our workers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(SeamlessAgentLoopWorker)

    def stop(self) -> None:
        """No group runs any more, and so nobody calls the plane; a worker that cannot be told so is killed."""
        told = {worker.stop.remote(): worker for worker in self.agent_loop_workers}
        ray.wait(list(told), num_returns=len(told), timeout=2 * STOP_S)
        for stopped, worker in told.items():
            try:
                ray.get(stopped, timeout=0)
            except ray.exceptions.RayError as error:  # it is dead, or an agent that never waits has its event loop
                logger.warning("%s did not stop, and is killed: %s: %s", worker, type(error).__name__, error)
                ray.kill(worker)
