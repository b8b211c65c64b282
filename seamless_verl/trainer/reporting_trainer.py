"""Reports each step, and validates, beside the next one, where what follows leaves time for it.

verl validates between two steps: devices that only train have nothing to do until the longest of its samples has ended.
A validation's samples are to be of one version of the weights, so that they have time until the next one is committed.

Owned state: the validation that runs, of which there is one at most. Its transitions:

    none --_validate--> running --finish_validation--> none

Both are called by the trainer's thread. The report of its step waits for its metrics, so that a step is logged whole,
and steps in their order. Its thread only reads what the trainer has: it works on a copy, with a buffer and a step's
number of its own.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from typing import Any

import ray
from omegaconf import DictConfig

from seamless_verl.runtime.process import BackgroundTask
from seamless_verl.runtime.step_metrics import VALIDATION_S, VALIDATION_WAITED_S
from seamless_verl.trainer.advantage_trainer import AdvantageTrainer
from seamless_verl.trainer.prompt_submission import RETRY_S
from seamless_verl.trainer.step_report import LOG_FROM_ANY_THREAD

ValidationMetrics = dict[str, float]
LOOK_S = 2.0  # between two looks at what a validation lacks, where nothing is known that would end it sooner


class ReportingTrainer(AdvantageTrainer):
    """verl's trainer with our parts, whose steps are reported beside the next one."""

    run_ended: Future[None]  # has a result once training has failed
    trains = False  # a run may validate before
    validation: BackgroundTask[ValidationMetrics] | None = None  # that runs
    validated: BackgroundTask[ValidationMetrics] | None = None  # of the step that ends, until its report is opened

    def __init__(self, config: DictConfig) -> None:
        self.run_ended = Future()
        super().__init__(config)

    def reports_in_thread(self) -> bool:
        """Whether the step that ends may be reported beside another.

        Not where all of the host's cores train, and not with a checkpoint, after which a run that is killed goes on:
        the step's line is in the file by then. A dump has the number of the step in which it is made.
        """
        trainer = self.config.trainer
        loggers = {trainer.logger} if isinstance(trainer.logger, str) else set(trainer.logger)
        waits = self.saves() or trainer.get("rollout_data_dir", None) or self._devices_are_all_cores()
        return not waits and loggers <= LOG_FROM_ANY_THREAD

    def validates_beside(self) -> bool:
        """Whether a validation at this step's end may run beside the next one.

        Not where all engines stand still while training computes, since then it gains nothing, nor where some cannot
        keep its calls meanwhile: they would go on with other weights. And not where rewards are computed on the
        trainer's devices, or samples are dumped, which verl does for one step alone.
        """
        keeps_calls = self.lending.generates_elsewhere and (self.lending.keeps_calls or not self.lending.ids)
        scored = self.reward_loop_manager.reward_loop_worker_handles is not None  # as rows are written
        dumps = self.config.trainer.get("validation_data_dir", None)
        return keeps_calls and scored and not dumps and self.reports_in_thread()

    def _validate(self) -> ValidationMetrics:
        """verl's; beside the next step it returns nothing, and the step's report adds the metrics."""
        if self.trains and self.validates_beside() and self._goes_on_at_once():
            validate = partial(self._validator()._validated_after, self.commit.loading())
            self.validation = self.validated = BackgroundTask("validation", validate)
            return {}
        self._finish_report()
        self.enter_stage(f"validating, step {self.global_steps}")
        metrics = self._validated_after(self.commit.wait)
        self.enter_stage(f"validated, step {self.global_steps}")
        return metrics

    def _validated_after(self, wait_for_loads: Callable[[], None]) -> ValidationMetrics:
        began = time.monotonic()
        wait_for_loads()
        metrics: ValidationMetrics = super()._validate()
        self.curve.add(self.global_steps, metrics)
        return metrics | {VALIDATION_S: time.monotonic() - began}

    def _validator(self) -> ReportingTrainer:
        """A copy of the trainer, with a buffer of its own: this one goes on to other steps, and samples meanwhile."""
        made = copy.copy(self)
        made.replay_buffer = self.replay_buffer.for_validation(made._await_validation_groups)
        return made

    def _await_validation_groups(self) -> None:
        """Returns when the groups that a validation lacks may have ended."""
        wait_for_groups = self.data_plane.actor.wait_for_groups.remote
        self.groups_seen = ray.get(wait_for_groups(self.groups_seen, self.poll_s, self.replay_buffer.lacking))

    def finish_validation(self) -> None:
        """Returns when the validation that runs, if any, has ended; raises what ended it. Devices are lent."""
        if self.validation is None:
            return
        self.enter_stage(f"validating, step {self.global_steps - 1}")
        while not self.validation.future.done():
            self.connect_replicas()
            self.replay_buffer.hurry_validation()
            self.lending.offer(None)
            wait([self.validation.future], timeout=RETRY_S if self.looks_often() else LOOK_S)
        self.replay_buffer.late = ()
        validation, self.validation = self.validation, None
        validation.result()

    def connect_replicas(self) -> None:
        """While training waits for what is generated: takes up replicas that have started, or reply again."""

    def finish_validation_before_commit(self) -> dict[str, float]:
        """Returns the metrics of the wait."""
        if self.validation is None:
            return {}
        began = time.monotonic()
        self.finish_validation()
        return {VALIDATION_WAITED_S: time.monotonic() - began}

    def _compute_metrics(self, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """The first piece of a step's report, which verl's loop then clears and logs."""
        self._finish_report()
        validated, self.validated = self.validated, None
        compute = partial(super()._compute_metrics, batch, metrics, *args, **kwargs)
        if self._goes_on_at_once() and self.reports_in_thread():
            self.report.open(compute, awaits=partial(self._add_validation, metrics, validated))
        else:
            compute()

    def _add_validation(self, metrics: dict[str, Any], validated: BackgroundTask[ValidationMetrics] | None) -> None:
        """To a step's metrics those of its validation, if it has one, once that has ended; not if the run has."""
        if validated is not None:
            wait([validated.future, self.run_ended], return_when=FIRST_COMPLETED)
            metrics.update(validated.result() if validated.future.done() else {})

    def _finish_report(self) -> None:
        """Returns when the report that runs, if any, has ended; a validation that it waits for is finished before."""
        if self.report.runs:
            self.enter_stage(f"logging, step {self.global_steps - 1}")
            self.report.finish()
