"""Submits prompts for generation as far as the staleness bound has room, and waits for finished groups.

Owned state: how many mini-batches training has taken, in this step and in all, how many steps' worth of prompts run
ahead, and which prompts are deferred. How many prompts may be submitted follows from these, from the outstanding
prompts, which the buffer counts, and from the staleness bound.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import ray
import transfer_queue as tq
from omegaconf import DictConfig
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils import tensordict_utils as tu

from seamless_verl.agent_loops.assignments import TRAIN, UNENDED
from seamless_verl.agent_loops.manager import SeamlessAgentLoopManager
from seamless_verl.config.schema import SeamlessConfig
from seamless_verl.data_plane.client import DataPlaneClient
from seamless_verl.resources.ahead import AheadLevel, EngineUse, StalenessBound
from seamless_verl.resources.lending.policy import Demand
from seamless_verl.resources.tail_batching import Draw, DrawView, TailBatching, extra_prompts
from seamless_verl.runtime.process import BackgroundTask
from seamless_verl.runtime.sample_lengths import LengthRecord
from seamless_verl.trainer.deferred_prompts import name_again, take_out
from seamless_verl.trainer.lending import DeviceLending
from seamless_verl.trainer.lending_view import TrainingProgress
from seamless_verl.trainer.prompt_names import PromptNames, data_rows
from seamless_verl.trainer.replay_buffer import SeamlessReplayBuffer
from seamless_verl.trainer.resubmission import without_trained
from seamless_verl.weights.commit import WeightCommit

logger = logging.getLogger(__name__)
POLL_S = 10.0  # only a fallback: agent loops notify the trainer
RETRY_S = 0.25  # between two decisions while training has devices that could generate, or a replica starts again


class PromptSubmittingTrainer(PPOTrainer):  # type: ignore[misc]
    """verl's trainer with our buffer; submits prompts before each update as far as the staleness bound has room."""

    seamless: SeamlessConfig
    data_plane: DataPlaneClient
    lending: DeviceLending
    commit: WeightCommit
    deferring: tuple[Sequence[str], BackgroundTask[None]] | None = None  # the prompts that a step left over
    prepared: dict[str, Any] | Exception | None = None  # by `begin_next_step`, for the step that begins next
    lengths: LengthRecord | None = None  # of the samples, where `seamless.record` asks for them

    def __init__(self, config: DictConfig) -> None:
        self.step_batches = self.trained = 0  # mini-batches taken, in this step and in all
        self.ahead: AheadLevel | None = None  # None where there is nothing to choose
        self.engine_use = EngineUse()
        self.sampling = False  # training waits for groups, or takes them
        self.step_began = 0.0
        self.computing = False  # a mini-batch was taken and is not trained yet
        self.groups_seen = 0  # the count of finished groups at the last look
        self.poll_s = POLL_S  # shorter where agent loops do not notify
        self.names = PromptNames()
        super().__init__(config)

    def fit(self, agent_loop_manager: Any) -> None:
        """Trains; the manager begins the generation of prompts when it may."""
        if isinstance(agent_loop_manager, SeamlessAgentLoopManager):
            agent_loop_manager.may_begin = self._when_it_may_begin
        super().fit(agent_loop_manager)

    def _when_it_may_begin(self, begin: Callable[[], None]) -> None:
        """Has generation begun on no older weights than those of the version before this step's."""
        self.commit.when_committed(self.global_steps - 1, begin)

    def _build_replay_buffer(self) -> SeamlessReplayBuffer:
        updates = self.parameter_sync_step
        self.tail = TailBatching(extra_prompts(self.seamless.tail_batching, self.config.data.train_batch_size))
        batch = self.config.data.train_batch_size // updates
        self.bound = StalenessBound(self.seamless.staleness_bound, batch, updates)
        if self.seamless.ahead is None and self.seamless.staleness_bound > 1:
            self.ahead = AheadLevel(self.seamless.staleness_bound)
        return SeamlessReplayBuffer(
            bound=self.bound,
            update=lambda: self.local_trigger_step,
            wait=self._wait_for_groups,
            defers=bool(self.tail.extra),
            lengths=self.lengths,
            trainer_mode=self.trainer_mode,
            trainer_config=self.config.trainer.v1.get(self.trainer_mode, {}),
            sampler_kwargs=self.config.trainer.v1.sampler.sampler_kwargs,
            refill_fn=self.refill,
            filter_groups_metric=self._resolve_filter_groups_metric(),
        )

    def _wait_for_groups(self) -> None:
        """Returns when the groups that a batch lacks may have ended since the last call, or after `poll_s` seconds."""
        self.lending.offer(None)  # the policy may lend now what it did not lend before
        seconds = min(self.poll_s, RETRY_S) if self.looks_often() else self.poll_s
        self._await_group(seconds, self.replay_buffer.lacking)

    def looks_often(self) -> bool:
        """Whether something else than a group may end the wait."""
        return bool(self.lending.reclaimed)

    def _await_group(self, seconds: float, enough: int = 1) -> bool:
        """Returns when so many groups have ended since the last call, or after so many seconds; whether one has.

        Of several the first is known a fifth of a second after its end at the latest.
        """
        seen = self.groups_seen
        self._look_at_engines()
        with self.commit.counting():
            self.groups_seen = ray.get(self.data_plane.actor.wait_for_groups.remote(seen, seconds, enough))
        self._look_at_engines()
        return self.groups_seen != seen

    def _look_at_engines(self) -> None:
        """While training waits: what they lose decides how far to run ahead, and what they generate when to lend."""
        if self.sampling and self.engine_use.due(time.monotonic()):
            seen = self.data_plane.observe()
            self.engine_use.look(seen.replicas, seen.waiting, time.monotonic(), self.batches_ahead)
            self.lending.measure(seen)

    def outstanding_uids(self) -> list[str]:
        """Prompts whose groups had not ended at the last look at the queue, validation's too; any thread may ask."""
        return self.replay_buffer.unfinished_uids()

    def wait_for_more(self) -> bool:
        """Waits for a group to end, and looks at the queue again; whether one did."""
        ended = self._await_group(self.poll_s)
        self.replay_buffer.outstanding()
        return ended

    def begin_next_step(self) -> None:
        """At a step's end: submits the prompts of the next one.

        What else a step's end takes, its metrics and the clearing of its rows, is done while engines generate. Else
        those that had ended what was drawn ahead would stand idle for it.
        """
        if not self._goes_on_at_once():
            return
        with self._as_next_step():
            try:
                self.prepared = self.prepare_step()
            except Exception as error:  # raised by that step: this one is logged first
                self.prepared = error

    @contextmanager
    def _as_next_step(self) -> Iterator[None]:
        """Prompts that are submitted in the block are the next step's."""
        self.global_steps += 1
        try:
            yield
        finally:
            self.global_steps -= 1

    def _goes_on_at_once(self) -> bool:
        """Whether the next step follows this one with no validation, profile or end of the run between.

        Not with a manager of the user's, which may generate before it returns.
        """
        if not isinstance(self.agent_loop_manager, SeamlessAgentLoopManager):
            return False
        trainer, step = self.config.trainer, self.global_steps
        ends = step >= self.total_training_steps or step // self.steps_per_epoch >= trainer.total_epochs
        validates = trainer.test_freq > 0 and step % trainer.test_freq == 0
        profiles = self.config.global_profiler.steps is not None
        return not (ends or validates or profiles or self.config.skip.rollout_tq.enable)

    def prepare_step(self) -> dict[str, Any]:
        """Submits as much as there is room for; with tail batching a few prompts more than the step needs."""
        if self.prepared is not None:
            prepared, self.prepared = self.prepared, None
            if isinstance(prepared, Exception):
                raise prepared
            self.replay_buffer.outstanding()  # what ended meanwhile is known before devices are offered
            return prepared
        if self.tail.extra or self.tail.deferred:
            if room := self.room():
                self._submit(self._draw(room, begins=True))
            return {}
        step, room = self.config.data.train_batch_size, self.room()
        if room < step:
            self.refill()
            return {}
        metrics = dict(super().prepare_step())
        if room > step and not self.config.skip.rollout_tq.enable:
            self.refill()  # more steps' worth are to generate than in the step before
        return metrics

    def _submit_batch_to_rollout(self, batch: Any) -> int:
        """Generation begins when the version of the step before is committed, and would else begin on an older one.

        A manager of the user's begins at once, so that the commit is waited for.
        """
        if not isinstance(self.agent_loop_manager, SeamlessAgentLoopManager):
            self.commit.wait_committed()
        if self.lengths is not None:
            self.lengths.begin(batch["uid"])
        return int(super()._submit_batch_to_rollout(batch))

    def room(self) -> int:
        """Prompts that may be submitted now."""
        return self.bound.room(self.replay_buffer.outstanding(), self.batches_ahead, self.step_batches)

    @property
    def batches_ahead(self) -> int:
        """Steps' worth of prompts that generate beyond those of the current step."""
        if self.ahead is not None:
            return self.ahead.level
        bound, asked = self.seamless.staleness_bound, self.seamless.ahead
        return bound if asked is None else min(asked, bound)

    def choose_ahead(self, idle: float) -> dict[str, float]:
        """At a step's end: how far to run ahead from now on; returns the metrics of the step that ends.

        `idle` is the share of its time in which the devices that generate computed nothing.
        """
        now, lost = time.monotonic(), self.engine_use.take()
        step_s, self.step_began = now - self.step_began, now
        if self.ahead is None:
            return {"seamless/ahead": float(self.batches_ahead)}
        level = self.ahead.level
        if reason := self.ahead.step_ended(step_s, lost, idle):
            logger.info("seamless.ahead is %s from now on: %s", self.ahead.level, reason)
        found = {"seamless/ahead": float(level), "seamless/ahead/lost_share": lost.seconds / step_s}
        if level > 1:
            found["seamless/ahead/lost_share/fewer"] = lost.with_fewer / step_s
        if level < self.ahead.most:
            found["seamless/ahead/lost_share/more"] = lost.with_more / step_s
        return found

    def _fetch_one_gen_batch(self) -> Any:
        """With a gateway a prompt has the same uid after a resume, by which the journal's sessions are found again."""
        batch = super()._fetch_one_gen_batch()
        if self.seamless.gateway.enabled:
            tu.assign_non_tensor_stack(batch, "uid", self.names.take(data_rows(batch)))
        return batch

    def _reissue_inflight_prompts(self, partition_id: str = TRAIN) -> int:
        """Submits the checkpoint's unfinished prompts again.

        With a gateway each keeps the step of its submission, as if the run had not stopped: what its sessions generated
        before may be as old as that. verl submits all of them anew, as do we for one that would be too old.
        """
        tags = without_trained((tq.kv_list(partition_id) or {}).get(partition_id, {}), partition_id)
        if not self.seamless.gateway.enabled:
            return int(super()._reissue_inflight_prompts(partition_id))
        unfinished = {uid: tag for uid, tag in tags.items() if tag.get("is_prompt") and tag["status"] in UNENDED}
        by_step: dict[int, list[str]] = {}
        for uid, tag in unfinished.items():
            too_old = self.bound.too_old(self.global_steps, tag["global_steps"])
            by_step.setdefault(self.global_steps if too_old else tag["global_steps"], []).append(uid)
        if rows := [key for key, tag in tags.items() if not tag.get("is_prompt") and key.split("_")[0] in unfinished]:
            tq.kv_clear(keys=rows, partition_id=partition_id)  # of a group that had ended, but was not marked so
        for step, uids in sorted(by_step.items()):
            prompts = tq.kv_batch_get(keys=uids, partition_id=partition_id)
            tu.assign_non_tensor_data(prompts, "global_steps", step)
            marks = [{"is_prompt": True, "status": "pending", "global_steps": step}] * len(uids)
            tq.kv_batch_put(keys=uids, partition_id=partition_id, tags=marks)
            self.agent_loop_manager.generate_sequences(prompts)
        return len(unfinished)

    def refill(self, at_most: int | None = None) -> None:
        """Submits as many prompts as there is room for, so that engines have work until the step ends."""
        room = self.room() if at_most is None else min(self.room(), at_most)
        if room:
            self._submit(self._draw(room, begins=False))

    def _draw(self, needed: int, *, begins: bool) -> Draw:
        """Which prompts to submit, where `needed` are lacking."""
        later = max(0, self.total_training_steps - self.global_steps) * int(self.config.data.train_batch_size)
        return self.tail.decide(DrawView(needed, needed + later, len(self.train_dataloader), begins))

    def _submit(self, draw: Draw) -> None:
        if draw.fresh:
            self._add_prompts_to_generate(draw.fresh)
        if draw.again:
            if self.lengths is not None:
                self.lengths.begin_again({uid: name_again(uid) for uid in draw.again})
            self._submit_batch_to_rollout(take_out(draw.again, self.global_steps))

    def _next_train_batch(self, num_prompts: int | None = None) -> Any:
        """Counts the prompts that it draws."""
        batch = super()._next_train_batch(num_prompts)
        self.tail.drew(len(batch))
        return batch

    def defer_rest(self) -> None:
        """With tail batching, when a step has its last mini-batch: ends the groups that are left over.

        The batch is prepared meanwhile: `await_deferred` is called before training computes, and at the latest before
        what became of groups is recorded. Until then nothing else is submitted or sampled.
        """
        if not self.tail.extra or self.step_batches < self.parameter_sync_step:
            return
        if left_over := self.replay_buffer.outstanding_prompts():
            self.deferring = left_over, BackgroundTask("deferral", partial(self._defer, left_over))

    def _defer(self, left_over: Sequence[str]) -> None:
        self.agent_loop_manager.defer(left_over)
        self.replay_buffer.defer(left_over, self.global_steps)

    def await_deferred(self) -> None:
        """Returns when the groups that a step left over have ended, and their prompts are put aside."""
        if self.deferring is not None:
            left_over, ended = self.deferring
            ended.result()
            self.tail.defer(left_over)
            self.deferring = None

    def refill_for_update(self) -> None:
        """Submits prompts before an update, except the first, whose prompts were submitted with the step."""
        if self.step_batches and not self.config.skip.rollout_tq.enable:  # with it, stored generations are read again
            self.refill()

    def count_mini_batch(self) -> None:
        self.step_batches, self.trained, self.computing = self.step_batches + 1, self.trained + 1, True

    def sample_began(self) -> None:
        self.sampling = True

    def sample_ended(self) -> None:
        self.sampling = False
        self.engine_use.wait_ended()

    def mini_batch_ended(self) -> None:
        """The mini-batch that was taken last, if any, is trained."""
        self.computing = False
        self.lending.statistics.mini_batch_ended()

    def step_ended(self) -> None:
        self.mini_batch_ended()
        self.step_batches = 0

    def progress(self) -> TrainingProgress:
        """How far training is, and what it waits for, as of the last look at the queue.

        A mini-batch counts as ready, and as left in the step, until it is trained.
        """
        needed, taken = self.bound.batch, int(self.computing)
        left = needed * (self.parameter_sync_step - self.step_batches + taken)
        demand = Demand(ready=self.replay_buffer.finished() + needed * taken, needed=needed, left_in_step=left)
        return TrainingProgress(
            demand,
            self.trained - taken,
            self.step_batches - taken,
            late=self.replay_buffer.late,
            unfinished=self.unfinished_sessions(),
        )

    def unfinished_sessions(self) -> int:
        """Sessions of the groups that generated at the last look at the queue."""
        return self.replay_buffer.unfinished() * int(self.config.actor_rollout_ref.rollout.n)
