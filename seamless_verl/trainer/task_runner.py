"""The actor that runs the training: verl's, with our trainer, and with what can start together started together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ray
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf, open_dict
from verl.trainer.main_ppo import TaskRunnerV1
from verl.utils.logging_utils import configure_verl_logging

from seamless_verl.platform.adaptation import plain_class
from seamless_verl.runtime.process import BackgroundTask, show_log
from seamless_verl.trainer.watchdog import ANSWER_S, Watchdog

LOOPS = "seamless_verl.agent_loops.worker.SeamlessAgentLoopManager"
POLL_S = 0.05  # between two looks at the queue where a manager of the user's own does not notify


class SeamlessTaskRunner(plain_class(TaskRunnerV1)):  # type: ignore[misc]
    """verl's task runner for the `seamless` trainer."""

    agent_loops: BackgroundTask[None] | None = None
    own_loops = False  # a manager of the user's own

    def run(self, config: DictConfig) -> None:
        """Trains to the end; the trainer registers itself as it is imported, in this process alone."""
        configure_verl_logging()
        show_log("INFO")
        config.transfer_queue.enable = True
        OmegaConf.resolve(config)
        self.config = config
        agent = config.actor_rollout_ref.rollout.agent
        self.own_loops = agent.get("agent_loop_manager_class") is not None
        if not self.own_loops:
            with open_dict(agent):
                agent.agent_loop_manager_class = LOOPS
        queue = BackgroundTask("transfer-queue", lambda: tq.init(config.transfer_queue))
        from seamless_verl.trainer.trainer import SeamlessTrainer

        queue.result()
        succeeded = False
        try:
            self.trainer = SeamlessTrainer(config)
            self.trainer.on_rewards_ready = self.start_agent_loops
            if self.own_loops:
                self.trainer.poll_s = POLL_S
            self.trainer.init()
            self.init_agent_loop_manager()
            self.watched(lambda: self.trainer.fit(self.agent_loop_manager))
            succeeded = True
        finally:
            self.close(succeeded)

    def start_agent_loops(self) -> None:
        """Starts the agent loops while the replicas start: they need only the balancer and the rewards.

        A manager of the user's own may need more, and is made when verl would make it.
        """
        if not self.own_loops and not self.config.distillation.enabled:
            self.agent_loops = BackgroundTask("agent-loops", super().init_agent_loop_manager)

    def init_agent_loop_manager(self) -> None:
        if self.agent_loops is None:
            super().init_agent_loop_manager()
        else:
            self.agent_loops.result()

    def watched(self, training: Callable[[], None]) -> None:
        """Trains; raises NoProgressError when the run makes no progress any more."""
        plane, limit = self.trainer.data_plane.actor, self.trainer.seamless.watchdog.no_progress_s
        watchdog = Watchdog(
            limit, lambda: ray.get(plane.progress.remote(), timeout=ANSWER_S), self.trainer.watched_actors
        )
        self.trainer.reached = watchdog.reached
        watchdog.train(training)

    def stop_agent_loops(self) -> None:
        """Stops those that call the data plane. A manager of the user's own may mean anything by `stop`."""
        from seamless_verl.agent_loops.worker import SeamlessAgentLoopManager

        manager = self.agent_loop_manager
        if isinstance(manager, SeamlessAgentLoopManager):
            manager.stop()
            return
        for worker in getattr(manager, "agent_loop_workers", ()):
            ray.kill(worker)

    def show_device_time(self) -> None:
        if (picture := self.trainer.device_time.finish()) is not None:
            print(f"device time: {picture}")  # noqa: T201 - where a run's own last lines go

    def close(self, succeeded: bool) -> None:
        """Stops the agent loops, then what they call: loggers, queue, gateway, engines; also when the trainer was
        never built.
        """
        tracking = getattr(self.trainer, "logger", None)
        parts: list[Callable[[], Any]] = [tq.close]
        if tracking is not None:
            parts.insert(0, partial(tracking.finish, exit_code=0 if succeeded else 1))
        if succeeded:  # else all of it ends with the job, and the journal has what agents were shown
            parts = [self.stop_agent_loops, *parts, self.show_device_time]
            parts += [self.trainer.data_plane.stop, self.trainer.servers.stop]
        call_all(parts)


def call_all(parts: Sequence[Callable[[], Any]]) -> None:
    """Calls each, whatever those before it raised, which is the context of what is raised at the end."""
    try:
        parts[0]()
    finally:
        if len(parts) > 1:
            call_all(parts[1:])


def task_runner_class() -> type:
    """What verl's `run_ppo` starts."""
    return ray.remote(SeamlessTaskRunner)  # type: ignore[no-any-return]
