"""Submits prompts for generation as far as the staleness bound has room."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import transfer_queue as tq
from verl.utils import tensordict_utils as tu

from seamless_verl.agent_loops.assignments import UNENDED
from seamless_verl.agent_loops.row_keys import prompt_of
from seamless_verl.resources.ahead import AheadLevel, EngineUse, StalenessBound
from seamless_verl.resources.lending.policy import Demand
from seamless_verl.resources.tail_batching import Draw, TailBatching
from seamless_verl.runtime.process import BackgroundTask
from seamless_verl.runtime.sample_lengths import LengthRecord
from seamless_verl.trainer.lending import TrainingProgress
from seamless_verl.trainer.prompt_names import by_step, drop_trained, name_again, pending, take_out
from seamless_verl.trainer.replay_buffer import SeamlessReplayBuffer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunCalls:
    """What the parts of a run call of verl's trainer, and ask of it."""

    step: Callable[[], int]
    update: Callable[[], int]  # of the step, from 0
    steps_left: Callable[[], int]
    data_size: Callable[[], int]  # batches of the data loader
    dataset_size: Callable[[], int]
    add_prompts: Callable[[int], Any]
    submit: Callable[[Any], Any]
    begin_step: Callable[[], Mapping[str, Any]]  # verl's own `prepare_step`
    wait: Callable[[], None]  # for groups to end
    manager: Callable[[], Any]  # gives the agent loop manager


class RunAhead:
    """How many steps' worth of prompts generate beyond those of the current step: given, or found while it trains.

    `most` is the permitted staleness; `asked` is the level that the user gave. Without one, no step is generated so far
    ahead that its tokens would be older than the `oldest` that are trained.
    """

    def __init__(self, most: int, asked: int | None, oldest: int | None = None) -> None:
        if asked is None and oldest is not None:
            most = min(most, oldest)
        self.given = most if asked is None else min(asked, most)
        self.chosen = AheadLevel(most) if asked is None and most > 1 else None  # None where there is nothing to choose
        self.engine_use = EngineUse()
        self.step_began = 0.0

    @property
    def level(self) -> int:
        return self.given if self.chosen is None else self.chosen.level

    def begin(self) -> None:
        """Training begins."""
        self.step_began = time.monotonic()

    def step_ended(self, idle: float) -> dict[str, float]:
        """Chooses how far to run ahead from now on; returns the metrics of the step that ends.

        `idle` is the share of its time in which the devices that generate computed nothing.
        """
        now, lost, level = time.monotonic(), self.engine_use.take(), self.level
        step_s, self.step_began = now - self.step_began, now
        if self.chosen is None:
            return {"seamless/ahead": float(level)}
        if reason := self.chosen.step_ended(step_s, lost, idle):
            logger.info("seamless.ahead is %s from now on: %s", self.chosen.level, reason)
        found = {"seamless/ahead": float(level), "seamless/ahead/lost_share": lost.seconds / step_s}
        if level > 1:
            found["seamless/ahead/lost_share/fewer"] = lost.with_fewer / step_s
        if level < self.chosen.most:
            found["seamless/ahead/lost_share/more"] = lost.with_more / step_s
        return found


@dataclass(eq=False)
class PromptFeed:
    """Submits the prompts of a run."""

    run: RunCalls
    buffer: SeamlessReplayBuffer  # counts outstanding prompts
    _: KW_ONLY
    ahead: RunAhead
    tail: TailBatching  # which prompts to draw, and which deferred ones to begin again
    updates: int  # of a step; each takes a batch of the staleness bound
    samples: int  # of a prompt, by default
    lengths: LengthRecord | None = None
    stored_generations: bool = False
    """whether verl reads those of an earlier run again (`skip.rollout_tq`): a step submits nothing else"""
    extra_sessions: Callable[[], int] = lambda: 0  # beyond `samples` of each group, with a sampler
    step_batches = trained = 0  # mini-batches taken, in this step and in all
    computing = False  # a mini-batch was taken and is not trained yet
    prepared: Mapping[str, Any] | Exception | None = None  # for the step that begins next
    deferring: tuple[Sequence[str], BackgroundTask[None]] | None = None  # the prompts that a step left over

    @property
    def bound(self) -> StalenessBound:
        return self.buffer.bound

    @property
    def step_prompts(self) -> int:
        return self.bound.batch * self.updates

    def room(self) -> int:
        """Prompts that may be submitted now."""
        return self.bound.room(self.buffer.outstanding(), self.ahead.level, self.step_batches)

    def prepare_step(self) -> dict[str, Any]:
        """Submits as much as there is room for; with tail batching a few prompts more than the step needs."""
        if self.prepared is not None:
            prepared, self.prepared = self.prepared, None
            if isinstance(prepared, Exception):
                raise prepared
            self.buffer.outstanding()  # what ended meanwhile is known before devices are offered
            return dict(prepared)
        if self.tail.extra or self.tail.deferred:
            if room := self.room():
                self._submit(self._draw(room, begins=True))
            return {}
        room = self.room()
        if room < self.step_prompts:
            self.refill()
            return {}
        metrics = dict(self.run.begin_step())
        if room > self.step_prompts and not self.stored_generations:
            self.refill()  # more steps' worth are to generate than in the step before
        return metrics

    def prepare_early(self) -> None:
        """As `prepare_step`, before the step begins; that step raises an error: the one before is logged first."""
        try:
            self.prepared = self.prepare_step()
        except Exception as error:
            self.prepared = error

    def refill(self, at_most: int | None = None) -> None:
        """Submits as many prompts as there is room for, so that engines have work until the step ends."""
        room = self.room() if at_most is None else min(self.room(), at_most)
        if room:
            self._submit(self._draw(room, begins=False))

    def refill_for_update(self) -> None:
        """Submits prompts before an update, except the first, whose prompts were submitted with the step."""
        if self.step_batches and not self.stored_generations:
            self.refill()

    def _draw(self, needed: int, *, begins: bool) -> Draw:
        """Which prompts to submit, where `needed` are lacking."""
        later = max(0, self.run.steps_left()) * self.step_prompts
        return self.tail.decide(needed, needed + later, self.run.data_size(), begins)

    def _submit(self, draw: Draw) -> None:
        if draw.fresh:
            self.run.add_prompts(draw.fresh)
        if draw.again:
            if self.lengths is not None:
                self.lengths.begin_again({uid: name_again(uid) for uid in draw.again})
            self.run.submit(take_out(draw.again, self.run.step()))

    def resubmit(self, partition_id: str) -> int:
        """Submits a checkpoint's unfinished prompts again, as if the run had not stopped; returns how many.

        Each keeps the step of its submission, as old as what its sessions generated before, unless it would be too old.
        """
        tags = drop_trained(partition_id)
        running = {uid: tag for uid, tag in tags.items() if tag.get("is_prompt") and tag["status"] in UNENDED}
        now, submitted = self.run.step(), {uid: int(tag["global_steps"]) for uid, tag in running.items()}
        unfinished = {uid: now if self.bound.too_old(now, step) else step for uid, step in submitted.items()}
        if rows := [key for key, tag in tags.items() if not tag.get("is_prompt") and prompt_of(key) in unfinished]:
            tq.kv_clear(keys=rows, partition_id=partition_id)  # of a group that had ended, but was not marked so
        for step, uids in by_step(unfinished):
            prompts = tq.kv_batch_get(keys=uids, partition_id=partition_id)
            tu.assign_non_tensor_data(prompts, "global_steps", step)
            tq.kv_batch_put(keys=uids, partition_id=partition_id, tags=pending(uids, step))
            self.run.manager().generate_sequences(prompts)
        return len(unfinished)

    def defer_rest(self) -> None:
        """With tail batching, when a step has its last mini-batch: ends the groups that are left over.

        The batch is prepared meanwhile: `await_deferred` is called before training computes, and at the latest before
        what became of groups is recorded. Until then nothing else is submitted or sampled.
        """
        if not self.tail.extra or self.step_batches < self.updates:
            return
        if left_over := self.buffer.outstanding_prompts():
            self.deferring = left_over, BackgroundTask("deferral", partial(self._defer, left_over))

    def _defer(self, left_over: Sequence[str]) -> None:
        self.run.manager().defer(left_over)
        self.buffer.defer(left_over, self.run.step())

    def await_deferred(self) -> None:
        """Returns when the groups that a step left over have ended, and their prompts are put aside."""
        if self.deferring is not None:
            left_over, ended = self.deferring
            ended.result()
            self.tail.defer(left_over)
            self.deferring = None

    def mini_batch_taken(self) -> None:
        self.step_batches, self.trained, self.computing = self.step_batches + 1, self.trained + 1, True

    def mini_batch_ended(self) -> None:
        """The mini-batch that was taken last, if any, is trained."""
        self.computing = False

    def step_ended(self) -> None:
        self.computing, self.step_batches = False, 0

    def progress(self) -> TrainingProgress:
        """How far training is, as of the last look at the queue; a mini-batch counts as ready until it is trained."""
        needed, taken = self.bound.batch, int(self.computing)
        left = needed * (self.updates - self.step_batches + taken)
        demand = Demand(ready=self.buffer.finished() + needed * taken, needed=needed, left_in_step=left)
        unfinished = self.buffer.unfinished() * self.samples + self.extra_sessions()
        done = (self.trained - taken, self.step_batches - taken)
        return TrainingProgress(demand, *done, late=self.buffer.late, unfinished=unfinished)
