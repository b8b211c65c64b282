"""The actor that runs the training: verl's, with our trainer and with what can start together started so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ray
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf, open_dict
from verl.trainer.main_ppo import TaskRunnerV1
from verl.utils.logging_utils import configure_verl_logging

from seamless_verl.platform.rebinding import plain_class
from seamless_verl.runtime.process import BackgroundTask, show_log
from seamless_verl.trainer.watchdog import ANSWER_S, Watchdog

LOOPS = "seamless_verl.agent_loops.worker.SeamlessAgentLoopManager"
UNHEARD_S = 0.05  # between two looks at the queue where a manager of the user's own rings no bell


class SeamlessTaskRunner(plain_class(TaskRunnerV1)):  # type: ignore[misc]
    """verl's task runner for the `seamless` trainer."""

    agent_loops: BackgroundTask[None] | None = None
    own_loops = False  # a manager of the user's own

    def run(self, config: DictConfig) -> None:
        """Train to the end; the trainer registers itself as it is imported, in this process alone."""
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
            self.trainer.when_rewards_are_up = self.start_agent_loops
            if self.own_loops:
                self.trainer.seconds_between_looks = UNHEARD_S
            self.trainer.init()
            self.init_agent_loop_manager()
            self.watched(lambda: self.trainer.fit(self.agent_loop_manager))
            succeeded = True
        finally:
            self.close(succeeded)

    def start_agent_loops(self) -> None:
        """Start the agent loops while the replicas start: they need only the balancer and the rewards.

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
        """Train, or raise StandstillError when nothing moves any more."""
        plane, limit = self.trainer.link.actor, self.trainer.seamless.watchdog.no_progress_s
        watchdog = Watchdog(limit, lambda: ray.get(plane.moved.remote(), timeout=ANSWER_S), self.trainer.where)
        self.trainer.reached = watchdog.reached
        watchdog.train(training)

    def stop_agent_loops(self) -> None:
        """Nobody calls the plane any more. What a manager of the user's own calls its `stop` may be anything."""
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
        """Stop the agent loops, then what they call: loggers, queue, gateway, engines; also when the trainer was
        never built.
        """
        tracking = getattr(self.trainer, "logger", None)
        parts: list[Callable[[], Any]] = [tq.close]
        if tracking is not None:
            parts.insert(0, partial(tracking.finish, exit_code=0 if succeeded else 1))
        if succeeded:  # else all of it ends with the job, and what was shown is on record
            parts = [self.stop_agent_loops, *parts, self.show_device_time]
            parts += [self.trainer.link.stop, self.trainer.servers.stop]
        in_turn(parts)


def in_turn(parts: Sequence[Callable[[], Any]]) -> None:
    """Call each, whatever those before it raised, which is the context of what is raised at the end."""
    try:
        parts[0]()
    finally:
        if len(parts) > 1:
            in_turn(parts[1:])


def task_runner_class() -> type:
    """What verl's `run_ppo` starts."""
    return ray.remote(SeamlessTaskRunner)  # type: ignore[no-any-return]
