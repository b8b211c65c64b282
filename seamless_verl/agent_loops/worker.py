"""verl's agent loop workers, which store a group of sessions in one put and notify the data plane of its end.

Nothing reads a session before its group has ended, so the last one of a group puts all of them. A session is trained
only if its score is a finite number.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import hydra
import ray
import transfer_queue as tq
from omegaconf import DictConfig, ListConfig, OmegaConf
from ray.exceptions import RaySystemError, RayTaskError
from verl.experimental.agent_loop import agent_loop
from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap, _agent_loop_registry
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ, apply_greedy_sampling_params
from verl.utils.rollout_trace import rollout_trace_attr

from seamless_verl.agent_loops.group import ERROR, GROUP, STUCK, UNTRAINABLE, SessionGroup, warn_of
from seamless_verl.agent_loops.loops import AgentFailedError, compares_turns, warn_once
from seamless_verl.agent_loops.prompt_builders import PromptBuilders
from seamless_verl.agent_loops.queue_writer import QueueWriter
from seamless_verl.agent_loops.rows import (
    FIRST,
    GREEDY_UNLESS,
    PROMPT,
    SAMPLES,
    Row,
    SessionOutputs,
    labelled,
    rows_of,
    share_reward,
    with_old_logprobs,
)
from seamless_verl.agent_loops.scoring import raised_by, reward_workers, scorer_of, with_arrays
from seamless_verl.agents.outcome import AgentStatus
from seamless_verl.config.schema import SeamlessConfig
from seamless_verl.config.verl_keys import RESERVED_COLUMNS
from seamless_verl.data_plane.client import PLANE, await_reply
from seamless_verl.data_plane.finished_sessions import HandedNote
from seamless_verl.data_plane.group_notifier import UNSCORED
from seamless_verl.data_plane.waits import group_name
from seamless_verl.errors import ConfigError, GroupDroppedError, SessionStuckError, shorten
from seamless_verl.platform.adaptation import plain_class, rebound
from seamless_verl.runtime.process import freeze_imports, show_log
from seamless_verl.runtime.scores import beside_score, score_of
from seamless_verl.runtime.waits import QUEUE, Wait, WaitKind
from seamless_verl.trajectory.account import DropReason

logger = logging.getLogger(__name__)
LOOPS_KEY = "actor_rollout_ref.rollout.agent.agent_loop_config_path"
BYPASS = "algorithm.rollout_correction.bypass_mode"
FILTER = "algorithm.filter_groups"
STOP_S = 30.0  # for cancelled agents to end
PROMPT_CHARS = 160  # of a prompt in a message


class SeamlessAgentLoopWorker(plain_class(AgentLoopWorkerTQ)):  # type: ignore[misc]
    """verl's worker; notifies the data plane of finished and failed groups, and acknowledges sessions."""

    compares_turns = bypasses = False
    scorer, filter_metric = "the reward function", ""

    def __init__(self, *args: Any, variables: Mapping[str, str] = MappingProxyType({}), **kwargs: Any) -> None:
        """`variables` of the command's environment, which agents read: those that this node has stay its own."""
        show_log()
        for name, value in variables.items():
            os.environ.setdefault(name, value)
        super().__init__(*args, **kwargs)
        self.plane = ray.get_actor(PLANE)
        self.loops: dict[str, Callable[..., Any]] = {}
        self.running: dict[str, tuple[SessionGroup, asyncio.Task[Any]]] = {}  # by the prompt's uid
        self.writer = QueueWriter()
        self.builders = PromptBuilders()
        self.reward_loop_worker_handles = reward_workers(self.reward_loop_worker_handles)
        self.seamless = SeamlessConfig.parse(self.config.get("seamless"))
        self.compares_turns = compares_turns(self.config)
        self.bypasses = bool(OmegaConf.select(self.config, BYPASS))
        self.scorer = scorer_of(self.config.reward)
        if OmegaConf.select(self.config, f"{FILTER}.enable"):
            self.filter_metric = str(OmegaConf.select(self.config, f"{FILTER}.metric"))
        freeze_imports()

    async def _run_prompt(
        self, prompt: dict[str, Any], sampling_params: dict[str, Any], trajectory: dict[str, Any], trace: bool = False
    ) -> None:
        """As verl's, which keeps an error of the whole prompt to its log: here it is the reason of its group."""
        partition = "val" if trajectory["validate"] else "train"
        first, name = int(prompt.pop(FIRST, 0)), str(prompt.pop(PROMPT, ""))
        group = SessionGroup(self.writer, prompt["uid"], partition=partition, first=first, prompt=name)
        GROUP.set(group)
        task = asyncio.current_task()
        assert task is not None
        entry = self.running[group.uid] = group, task
        try:
            await tq.async_kv_put(key=group.uid, partition_id=partition, tag={"status": "running"})
            try:
                await self._run_sessions(group, prompt, sampling_params, trajectory, trace)
            except Exception as error:  # whatever it is, its prompt is replaced by another
                group.failed_whole(error)
            tag = {"status": "finished" if group.kept else "failure"}
            await tq.async_kv_put(key=group.uid, partition_id=partition, tag=tag)
        except asyncio.CancelledError:
            if not group.deferred:
                raise
            task.uncancel()
        finally:
            if self.running.get(group.uid) is entry:  # else it was reopened, and runs under its uid again
                del self.running[group.uid]
        if group.kept is None:  # some of its sessions were stopped before they began
            group.cancelled = True
            await group.hand_over()
        await await_reply(self.plane.notify_group_ended.remote(group.end()))

    async def _run_sessions(
        self,
        group: SessionGroup,
        prompt: dict[str, Any],
        sampling: dict[str, Any],
        trajectory: dict[str, Any],
        trace: bool,
    ) -> None:
        """Runs the group's sessions to their ends; what ends one of them is counted by the group."""
        rollout = self.config.actor_rollout_ref.rollout
        total = prompt.pop(SAMPLES, rollout.val_kwargs.n if group.validation else rollout.n)
        group.total = int(total)
        if group.total < 1:
            raise ValueError(f"its column {SAMPLES} is {total}: a prompt has 1 session or more")
        # the first ones are enough of a group that was reopened
        group.needed = 0 if group.first else 1 if group.validation else self.seamless.sessions_needed(group.total)
        sampling = dict(sampling)
        if not prompt.pop(GREEDY_UNLESS, True) and not group.validation:
            apply_greedy_sampling_params(sampling)
        columns = {name: value for name, value in prompt.items() if name not in RESERVED_COLUMNS}
        if dropped := prompt.keys() - columns:
            warn_once(f"columns {sorted(dropped)} of the data are left out: the run computes columns of these names")
        sessions = (
            self._run_agent_loop(sampling, trajectory, trace=trace, session_id=i, **columns) for i in range(group.total)
        )
        for error in await asyncio.gather(*map(asyncio.create_task, sessions), return_exceptions=True):
            if isinstance(error, Exception) and not isinstance(error, GroupDroppedError):  # of its hand-over
                logger.error("the group of prompt %s failed", group.uid, exc_info=error)

    async def stop(self) -> None:
        """Ends the groups that still run, and with them their calls, unless an agent does not end."""
        running = set(self.background_tasks)
        for task in running:
            task.cancel()
        await self._await_end(running)
        if self.writer.writing is not None:  # a put that has begun is completed
            await asyncio.wait({self.writer.writing}, timeout=STOP_S)

    async def defer(self, uids: Collection[str]) -> None:
        """Ends the groups of these prompts that still run, and puts nothing of them; one whose last session has
        ended is handed over first.
        """
        running = [(group, task) for uid, (group, task) in self.running.items() if uid in uids]
        for group, task in running:
            if group.defer():
                task.cancel()
        await self._await_end({task for _, task in running})

    async def waits(self) -> list[Wait]:
        """The groups that run here, and the put of the rows of those that have ended, for the watchdog."""
        now = time.monotonic()
        waits = [group_wait(group, now) for group, _ in self.running.values()]
        if self.writer.since is not None:
            waits.append(Wait(WaitKind.QUEUE, QUEUE, now - self.writer.since, what="has not taken rows"))
        return waits

    async def end_stuck(self, uid: str, session_id: str, reason: str) -> int:
        """Ends a session of this group, as `SessionGroup.end_stuck`; does not wait for its agent to end."""
        entry = self.running.get(uid)
        return 0 if entry is None else entry[0].end_stuck(session_id, reason)

    async def _await_end(self, running: set[asyncio.Task[Any]]) -> None:
        unended = (await asyncio.wait(running, timeout=STOP_S))[1] if running else running
        if unended:
            logger.warning("%s of %s groups did not end within %s s", len(unended), len(running), STOP_S)

    async def _run_agent_loop(self, sampling_params: dict[str, Any], trajectory: dict[str, Any], **kwargs: Any) -> None:
        """One session of a group; the last to end hands over the group's rows."""
        group, task = GROUP.get(), asyncio.current_task()
        assert task is not None
        kwargs["session_id"] += group.first
        group.running[task] = ""
        try:
            await self._run_session(sampling_params, trajectory, **kwargs)
        except asyncio.CancelledError as error:
            if not task.cancelling():
                cancelled = AgentFailedError("its agent loop raised CancelledError, and nobody had cancelled it", ERROR)
                cancelled.__cause__ = error
                group.session_failed(kwargs["session_id"], cancelled, ERROR)
            elif (
                (reason := group.stuck.get(task)) is None or task.uncancel() > 0 or group.cancelled
            ):  # stopped, or deferred
                group.cancelled = True
                raise
            else:
                group.session_failed(kwargs["session_id"], SessionStuckError(reason), STUCK)
        except Exception as error:  # whatever the loop raised: its group goes on without this session
            group.session_failed(kwargs["session_id"], error, getattr(error, "kind", ERROR))
        except BaseException:
            group.cancelled = True
            raise
        finally:
            del group.running[task]  # what is handed over is not interrupted
            await group.session_ended()

    async def _run_session(
        self, sampling: dict[str, Any], trajectory: dict[str, Any], /, *, agent_name: str, trace: bool, **kwargs: Any
    ) -> None:
        """Runs a session and scores it; its rows wait for the others of its group."""
        attributes = {key: trajectory[key] for key in ("sample_index", "step", "rollout_n", "validate")}
        with rollout_trace_attr(**attributes, name="agent_loop", trace=trace):
            output, group = await self._agent_loop(agent_name).run(sampling, **kwargs), GROUP.get()
            outputs = output if isinstance(output, list) else [output]
            session = output if isinstance(output, SessionOutputs) else None
            if not outputs:
                raise AgentFailedError("it left nothing to train", UNTRAINABLE)
            begun = time.time()
            try:
                rows = await self._scored_rows(outputs, trajectory["validate"], kwargs)
            except BaseException as error:
                if session is not None:
                    await session.acknowledge(False, self._dropped_note(session, group, error))
                raise
            if session is not None and session.failure not in (None, AgentStatus.INVALID_REWARD):
                group.failure_rewarded(session.failure, session.error)
            if session is not None:
                session.scored = begun, time.time()
            group.add(session, rows)

    def _agent_loop(self, name: str) -> Any:
        if name not in self.loops:
            if name not in _agent_loop_registry:
                problem = f"no agent loop has that name, only {sorted(_agent_loop_registry)}"
                raise ConfigError("agent_name", name, problem, f"Name it in the file of {LOOPS_KEY}, or in the data")
            self.loops[name] = loop_factory(_agent_loop_registry[name])
        with rebound(agent_loop, create_continuous_token_builder=self.builders):
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

    async def _scored_rows(self, outputs: list[Any], validate: bool, sample: dict[str, Any]) -> list[Row]:
        """The rows of a session that was scored by its loop or by verl, which its last output is for.

        A teacher sees each of its outputs, not only the last as in verl: all of them are trained.
        """
        last = outputs[-1]
        await self._score(outputs, sample, validate)
        seen = (self._compute_teacher_logprobs(o, o.prompt_ids, o.response_ids, validate, sample) for o in outputs)
        await asyncio.gather(*seen)
        share_reward(outputs)
        rows = labelled(rows_of(outputs, self, sample), GROUP.get().prompt, last.reward_score)
        return [with_old_logprobs(row) for row in rows] if self.bypasses and not validate else rows

    @staticmethod
    def _dropped_note(session: SessionOutputs, group: SessionGroup, error: BaseException) -> HandedNote:
        unscored = getattr(error, "kind", None) == UNSCORED
        reason = shorten(error) if unscored else "its rows could not be made"
        dropped = DropReason.REWARD if unscored else group.dropped_as
        return session.note(group.uid, reason, validation=group.validation, dropped=dropped)

    async def _score(self, outputs: list[Any], sample: dict[str, Any], validate: bool) -> None:
        """Has a session scored by verl unless its agent loop did, and passes its score through the gate.

        A session of training without a score is left out of its group. One of a validation has the score NaN, which the
        trainer leaves out of the validation's metrics. Where the trainer scores, it has none yet.
        """
        last, by_loop, raised = outputs[-1], outputs[-1].reward_score is not None, ""
        try:
            await self._compute_score(outputs, kwargs=with_arrays(sample))
        except (RayTaskError, RaySystemError) as error:  # it raised, or what it gave cannot be sent
            raised = raised_by(error)
        except (LookupError, TypeError) as error:  # what it gave cannot be read
            warn_of("unread scores", f"prompt {GROUP.get().uid}: its session could not be scored", exc_info=True)
            raised = raised_by(error)
        info = last.extra_fields["reward_extra_info"] = beside_score(last.extra_fields.get("reward_extra_info"))
        if last.reward_score is None and self.reward_loop_worker_handles is None:
            return
        try:
            if last.reward_score is None and raised:
                raise ValueError(raised)
            last.reward_score = score_of(last.reward_score)
            if self.filter_metric in info and not validate:
                score_of(info[self.filter_metric])  # verl reads it of every session of a group
        except ValueError as error:
            text = f"{'its agent loop' if by_loop else self.scorer}: {error}"
            if getattr(outputs, "failure", None) == AgentStatus.INVALID_REWARD:
                text = outputs.error  # type: ignore[attr-defined]
            text = f"it has no score. {text}. Its prompt: {shorten(sample.get('raw_prompt'), PROMPT_CHARS)}"
            last.reward_score = math.nan if validate else None
            if not validate:
                raise AgentFailedError(text, UNSCORED) from error
            group = GROUP.get()
            group.failed[UNSCORED] += 1
            where = f"session {sample['session_id']} of the validation prompt {group.uid}"
            warn_of(f"{UNSCORED} in a validation", f"{where}: {text}")


def group_wait(group: SessionGroup, now: float) -> Wait:
    """The group as a node; the data planes know what its sessions wait for."""
    on = () if group.running else (QUEUE,)
    what = f"has {len(group.running)} sessions that run without a call"
    return Wait(WaitKind.GROUP, group_name(group.uid), now - group.began, on, what)


def loop_factory(config: Any) -> Callable[..., Any]:
    """A function that makes loops of this configuration. If no part must be new for each loop, Hydra reads it once."""
    if any(isinstance(value, Mapping | list | ListConfig | DictConfig) for value in config.values()):
        return partial(hydra.utils.instantiate, config)
    factory = hydra.utils.instantiate(config, _partial_=True)
    return partial(factory.func, *factory.args, **factory.keywords) if isinstance(factory.func, type) else factory
