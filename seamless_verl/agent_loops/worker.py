"""verl's agent loop workers, which store a group of sessions in one put and notify the data plane of its end.

verl puts each session into TransferQueue by itself. Nothing reads a session before its group has ended, so here the
last session of a group puts all of them. The workers are stopped before the data plane that they call.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import hydra
import ray
from omegaconf import DictConfig, ListConfig
from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap, _agent_loop_registry
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.utils.rollout_trace import rollout_trace_attr

from seamless_verl.agent_loops.loops import SessionAgentLoop
from seamless_verl.agent_loops.queue_writer import QueueWriter
from seamless_verl.agent_loops.rows import Row, SessionOutputs, rows_of, share_reward
from seamless_verl.data_plane.client import PLANE, await_reply
from seamless_verl.errors import ConfigError
from seamless_verl.platform.adaptation import plain_class
from seamless_verl.runtime.process import freeze_imports, show_log

logger = logging.getLogger(__name__)
MAX_ERROR_CHARS = 4000  # characters of an error that are passed on; all of it is in the log
LOOPS_KEY = "actor_rollout_ref.rollout.agent.agent_loop_config_path"
STOP_S = 30.0  # for cancelled agents to end


@dataclass
class SessionGroup:
    """The sessions of one prompt. They begin in one turn of the event loop, so only a session that awaits nothing can
    end before all have begun; its rows are then stored by themselves."""

    writer: QueueWriter
    errors: list[str] = field(default_factory=list)
    running: int = 0
    failed: bool = False
    rows: list[Row] = field(default_factory=list)
    sessions: list[SessionOutputs] = field(default_factory=list)

    @contextmanager
    def session(self) -> Iterator[None]:
        self.running += 1
        try:
            yield
        except BaseException:
            self.failed = True
            raise
        finally:
            self.running -= 1

    async def hand_over(self, partition: str) -> None:
        """Writes the rows, each once, unless the group has failed; acknowledges the sessions to their data planes."""
        rows, self.rows, sessions, self.sessions = self.rows, [], self.sessions, []
        kept = False
        try:
            if not self.failed:
                await self.writer.put(rows, partition)
                kept = True
        finally:
            await asyncio.gather(*(session.acknowledge(kept) for session in sessions))


GROUP: ContextVar[SessionGroup] = ContextVar("group")
"""The group of the prompt that this task, or the one that started it, belongs to."""


class SeamlessAgentLoopWorker(plain_class(AgentLoopWorkerTQ)):  # type: ignore[misc]
    """verl's worker; notifies the data plane of finished and failed groups, and acknowledges sessions."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        show_log()
        super().__init__(*args, **kwargs)
        self.plane = ray.get_actor(PLANE)
        self.loops: dict[str, Callable[..., Any]] = {}
        self.writer = QueueWriter()
        SessionAgentLoop.confirmed = True
        freeze_imports()

    async def _run_prompt(self, *args: Any, **kwargs: Any) -> None:
        GROUP.set(group := SessionGroup(self.writer))
        await super()._run_prompt(*args, **kwargs)
        error = group.errors[-1][-MAX_ERROR_CHARS:] if group.errors else None
        await await_reply(self.plane.notify_group_ended.remote(error))

    async def stop(self) -> None:
        """Ends the groups that still run, and with them their calls, unless an agent does not end."""
        running = set(self.background_tasks)
        for task in running:
            task.cancel()
        unended = (await asyncio.wait(running, timeout=STOP_S))[1] if running else running
        if unended:
            logger.warning("%s of %s groups did not end within %s s", len(unended), len(running), STOP_S)
        if self.writer.writing is not None:  # a put that has begun is completed
            await asyncio.wait({self.writer.writing}, timeout=STOP_S)

    async def _run_agent_loop(self, sampling_params: dict[str, Any], trajectory: dict[str, Any], **kwargs: Any) -> None:
        try:
            await self._run_session(sampling_params, trajectory, **kwargs)
        except Exception as error:
            GROUP.get().errors.append(f"{type(error).__name__}: {error}")
            raise

    async def _run_session(
        self, sampling: dict[str, Any], trajectory: dict[str, Any], /, *, agent_name: str, trace: bool, **kwargs: Any
    ) -> None:
        """One session of a group; the last to end hands over the group's rows."""
        group = GROUP.get()
        attributes = {key: trajectory[key] for key in ("sample_index", "step", "rollout_n", "validate")}
        try:
            with group.session(), rollout_trace_attr(**attributes, name="agent_loop", trace=trace):
                output = await self._agent_loop(agent_name).run(sampling, **kwargs)
                await self._agent_loop_postprocess(output, trajectory["validate"], **kwargs)
        finally:
            if not group.running:
                await group.hand_over("val" if trajectory["validate"] else "train")

    def _agent_loop(self, name: str) -> Any:
        """A new loop of that name."""
        if name not in self.loops:
            if name not in _agent_loop_registry:
                problem = f"no agent loop has that name, only {sorted(_agent_loop_registry)}"
                raise ConfigError("agent_name", name, problem, f"Name it in the file of {LOOPS_KEY}, or in the data")
            self.loops[name] = loop_factory(_agent_loop_registry[name])
        return self.loops[name](
            trainer_config=DictConfigWrap(self.config),
            server_manager=self.llm_client,
            tokenizer=self.tokenizer,
            processor=self.processor,
            hf_model_type=self.hf_model_type,
            dataset_cls=self.dataset_cls,
            data_config=DictConfigWrap(self.config.data),
            tools=ToolListWrap(self.tools),
        )

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> None:
        """Scores a session; its rows wait for the others of its group."""
        outputs = output if isinstance(output, list) else [output]
        if outputs:
            last = outputs[-1]
            await self._compute_score(outputs, kwargs=kwargs)
            await self._compute_teacher_logprobs(last, last.prompt_ids, last.response_ids, validate, kwargs)
            share_reward(outputs)
            GROUP.get().rows += rows_of(outputs, self, kwargs)
        else:
            logger.warning("session %s of prompt %s left nothing to train on", kwargs["session_id"], kwargs["uid"])
        if isinstance(output, SessionOutputs):
            GROUP.get().sessions.append(output)


def loop_factory(config: Any) -> Callable[..., Any]:
    """A function that makes loops of this configuration. If no part must be new for each loop, Hydra reads it once."""
    if any(isinstance(value, Mapping | list | ListConfig | DictConfig) for value in config.values()):
        return partial(hydra.utils.instantiate, config)
    factory = hydra.utils.instantiate(config, _partial_=True)
    return partial(factory.func, *factory.args, **factory.keywords) if isinstance(factory.func, type) else factory


class SeamlessAgentLoopManager(AgentLoopManagerTQ):  # type: ignore[misc]
    """verl's manager with our worker class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(SeamlessAgentLoopWorker)

    def stop(self) -> None:
        """Ends all groups, so that no call to the data plane is open; a worker that does not reply is killed."""
        stopping = {worker.stop.remote(): worker for worker in self.agent_loop_workers}
        ray.wait(list(stopping), num_returns=len(stopping), timeout=2 * STOP_S)
        for stopped, worker in stopping.items():
            try:
                ray.get(stopped, timeout=0)
            except ray.exceptions.RayError as error:  # it is dead, or an agent blocks its event loop
                logger.warning("%s did not stop, and is killed: %s: %s", worker, type(error).__name__, error)
                ray.kill(worker)
