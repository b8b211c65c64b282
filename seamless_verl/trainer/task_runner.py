"""verl's task runner, the actor that runs a training, with our trainer, and the node on which it is started.

It has the data plane beside it, so that the loss of its node ends the run. Where machines have tags, they are compared
with the cluster here: a run that cannot be placed is refused before its task runner has imported anything.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ray
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.trainer.main_ppo import TaskRunnerV1
from verl.utils.logging_utils import configure_verl_logging

from seamless_verl.config.checks.agents import variables_of
from seamless_verl.config.planning import plan_by_tags
from seamless_verl.config.schema import SeamlessConfig
from seamless_verl.errors import ActorLostError, GroupsFailedError
from seamless_verl.platform.adaptation import ActorClassWith, plain_class
from seamless_verl.resources.machines import ClusterNode, Machine, describe_loss, runner_node
from seamless_verl.runtime.actor_death import ACTOR_GONE, last_line
from seamless_verl.runtime.checkpoint_marker import step_folder, tracker_state
from seamless_verl.runtime.console import keep_cause, show_line
from seamless_verl.runtime.process import BackgroundTask, show_log
from seamless_verl.trainer.deaths import (
    LOOP_WORKER,
    REWARD_WORKER,
    DeathWatch,
    NodeWatch,
    Recoveries,
    clock_warnings,
    numbered,
    queue_actors,
    watch_ray_processes,
)
from seamless_verl.trainer.needed_nodes import actors_on, nodes_of_run, places_storage
from seamless_verl.trainer.pools import TagPools, cluster_nodes
from seamless_verl.trainer.run_waits import PlaneProgress, RunWaits, limits_of, plane_names, stacks_of
from seamless_verl.trainer.watchdog import StuckWatch, Watchdog

logger = logging.getLogger(__name__)
POLL_S = 10.0  # between two looks at the queue at most: agent loops notify the trainer
CUSTOM_POLL_S = 0.05  # with a custom agent loop manager, which does not


class SeamlessTaskRunner(plain_class(TaskRunnerV1)):  # type: ignore[misc]
    """verl's task runner for the `seamless` trainer."""

    agent_loops: BackgroundTask[None] | None = None
    deaths: DeathWatch
    watchdog: Watchdog
    stuck: StuckWatch
    custom_loops = False  # the user configured another agent loop manager

    def __init__(self, *args: Any, variables: Mapping[str, str] = MappingProxyType({}), **kwargs: Any) -> None:
        """`variables` of the command's environment are for the agent loop workers."""
        super().__init__(*args, **kwargs)
        self.variables = variables

    def run(self, config: DictConfig) -> None:
        """Trains to the end; the trainer registers itself when it is imported, only in this process."""
        configure_verl_logging()
        show_log("INFO")
        with actors_on(nodes_of_run(config), storage_elsewhere=places_storage(config)):
            self.run_here(config)

    def run_here(self, config: DictConfig) -> None:
        """As `run`, while the actors that verl makes get nodes that the run needs."""
        config.transfer_queue.enable = True
        OmegaConf.resolve(config)
        self.config = config
        self.custom_loops = config.actor_rollout_ref.rollout.agent.get("agent_loop_manager_class") is not None
        queue = BackgroundTask("transfer-queue", lambda: tq.init(config.transfer_queue))
        from seamless_verl.trainer.trainer import SeamlessTrainer

        queue.result()
        succeeded = False
        try:
            self.trainer = SeamlessTrainer(
                config,
                enter_stage=lambda stage: self.watchdog.enter_stage(stage),
                watch_metrics=self.watch_metrics,
                on_rewards_ready=self.start_agent_loops,
                poll_s=CUSTOM_POLL_S if self.custom_loops else POLL_S,
            )
            self.trainer.init()
            self.init_agent_loop_manager()
            self.train_watched(lambda: self.trainer.fit(self.agent_loop_manager))
            succeeded = True
        except Exception as error:
            keep_cause(error)  # before parts are closed, whose errors would take its place
            raise
        finally:
            self.close(succeeded)

    def start_agent_loops(self) -> None:
        """Starts our agent loops while the replicas start: they need only balancer and rewards."""
        if not self.custom_loops and not self.config.distillation.enabled:
            self.agent_loops = BackgroundTask("agent-loops", self.make_agent_loops)

    def init_agent_loop_manager(self) -> None:
        if self.agent_loops is not None:
            self.agent_loops.result()
        elif self.custom_loops:
            super().init_agent_loop_manager()
        else:
            self.make_agent_loops()

    def make_agent_loops(self) -> None:
        """As verl's `init_agent_loop_manager`, with our manager."""
        from seamless_verl.agent_loops.manager import SeamlessAgentLoopManager

        self.agent_loop_manager = SeamlessAgentLoopManager.create(
            config=self.config,
            llm_client=self.trainer.get_llm_client(),
            teacher_client=self.trainer.get_teacher_client(),
            reward_loop_worker_handles=self.trainer.get_reward_handles(),
            variables=self.variables,
        )

    def train_watched(self, training: Callable[[], None]) -> None:
        """Trains; raises when the run makes no more progress, or will make none: an actor is lost, or a load failed."""
        trainer, loops = self.trainer, self.own_loops()
        nodes = NodeWatch(lambda: {} if trainer.pools is None else trainer.pools.machines_by_node())
        for warning in clock_warnings(trainer.training_actors() | trainer.watched_actors()):
            logger.warning(warning)
        if loops is not None:
            loops.begin_watch(trainer.seamless.restarts, trainer.data_plane.actors)
        recoveries = Recoveries(trainer.data_plane.actor, loops)
        self.deaths = DeathWatch(self.needed_actors, nodes.describe, recoveries.starts_again, recoveries.start_again)
        self.watchdog = Watchdog(
            trainer.seamless.watchdog.no_progress_s,
            PlaneProgress(trainer.data_plane.actors),
            trainer.watched_actors,
            checks=[
                *(self.deaths.check, recoveries.check, nodes.check),
                *(part.raise_failed for part in (trainer.commit, trainer.starter)),
                lambda: self.stuck.check(),
            ],
            explain=lambda: self.stuck.explain(),
        )
        self.stuck = self.stuck_watch(recoveries)
        try:
            self.watchdog.train(training)
        except (*ACTOR_GONE, GroupsFailedError) as error:  # groups fail faster than the watchdog looks
            self.deaths.check_soon(error)  # names the actor and its node, if the run needed it
            raise

    def stuck_watch(self, recoveries: Recoveries) -> StuckWatch:
        """Watches the limits of what waits in a run."""
        trainer, loops = self.trainer, self.own_loops()
        planes = dict(zip(plane_names(len(trainer.data_plane.actors)), trainer.data_plane.actors, strict=True))
        waits = RunWaits(
            stage=self.watchdog.stage_s,
            planes=lambda: planes,
            workers=lambda: {} if loops is None else numbered(LOOP_WORKER, loops.agent_loop_workers),
            silent_s=self.deaths.silent_s,
            training=trainer.training_actors,
            commit=trainer.commit.under_way,
            outstanding=lambda: trainer.replay_buffer.unfinished_uids(),
        )
        return StuckWatch(
            waits.collect,
            limits_of(trainer.seamless.watchdog),
            recoveries.by_kind,
            report=lambda one: stacks_of(
                waits.concerned(one), self.needed_actors() | planes | trainer.watched_actors()
            ),
            without_progress_s=self.watchdog.without_progress_s,
        )

    def watch_metrics(self) -> dict[str, float]:
        loops = self.own_loops()
        return self.stuck.metrics() | ({} if loops is None else loops.metrics())

    def needed_actors(self) -> dict[str, Any]:
        """The actors without which the run waits for ever, by name."""
        loops = getattr(self.agent_loop_manager, "agent_loop_workers", ())
        rewards = getattr(self.trainer.reward_loop_manager, "reward_loop_workers", ())
        named = numbered(LOOP_WORKER, loops) | numbered(REWARD_WORKER, rewards)
        return named | queue_actors() | self.trainer.training_actors()

    def own_loops(self) -> Any:
        """The agent loop manager, if it is ours; None for one of the user's own."""
        from seamless_verl.agent_loops.manager import SeamlessAgentLoopManager

        return self.agent_loop_manager if isinstance(self.agent_loop_manager, SeamlessAgentLoopManager) else None

    def stop_agent_loops(self) -> None:
        """Stops the workers that call the data plane. A custom manager's are killed: its `stop` may do anything."""
        if (own := self.own_loops()) is not None:
            own.stop()
            return
        for worker in getattr(self.agent_loop_manager, "agent_loop_workers", ()):
            ray.kill(worker)

    def print_what_is_left(self) -> None:
        """The files that a user looks for next. verl prints a run's last lines too."""
        if (trace := self.trainer.device_time.finish()) is not None:
            show_line(f"device time: {trace}, shown by seamless-verl view {trace.parent}")
        folder = Path(self.trainer.config.trainer.default_local_dir)
        named, *_ = tracker_state(folder) or ("",)  # the newest whole one: async_save may still write another
        if named in map(str, self.trainer.checkpoints.saved):
            show_line(f"checkpoint: {step_folder(folder, int(named))}")

    def close(self, succeeded: bool) -> None:
        """Stops the agent loops, then loggers, queue, gateway and engines; also if the trainer was never built."""
        tracking = getattr(self.trainer, "logger", None)
        stops: list[Callable[[], Any]] = [getattr(self.trainer, "close_metrics", do_nothing), tq.close]
        if tracking is not None:
            stops.insert(0, partial(tracking.finish, exit_code=0 if succeeded else 1))
        if succeeded:  # else all of this ends with the job, and the journal has what agents received
            stops = [self.await_loads, self.stop_agent_loops, *stops, self.print_what_is_left]
            stops += [self.trainer.starter.close, self.trainer.data_plane.stop, self.trainer.servers.stop]
        call_all(stops)

    def await_loads(self) -> None:
        """A replica that loads the last version cannot be stopped. Training is complete also if a load fails."""
        try:
            self.trainer.commit.wait()
        except Exception as error:  # whatever a load raised
            logger.warning("the last weights were not loaded, which nothing needs any more: %s", error)


def do_nothing() -> None: ...


def call_all(functions: Sequence[Callable[[], Any]]) -> None:
    """Calls each function, even if an earlier one raised; a later error has the earlier ones as its context."""
    try:
        functions[0]()
    finally:
        if len(functions) > 1:
            call_all(functions[1:])


def task_runner_class() -> type:
    """The actor class that verl's `run_ppo` starts."""
    return ray.remote(SeamlessTaskRunner)  # type: ignore[no-any-return]


class PlacedTaskRunner:
    """Stands in for the actor class in verl's `run_ppo`, which starts one when Ray is connected."""

    def __init__(self, config: DictConfig) -> None:
        self.config = config
        self.node: ClusterNode | None = None
        self.machines: dict[str, list[Machine]] = {}  # of the plan, by the ids of their nodes

    def remote(self) -> Any:
        return self.options().remote()

    def options(self, **options: Any) -> Any:
        """The actor class with these options, on its node. Ray chooses one for a run without tags.

        Raises:
            ConfigError: a machine has no node, or no node has room for the task runner; not where such are waited for.
        """
        watch_ray_processes()
        plan = plan_by_tags(self.config)
        if plan is not None:
            wait_s = SeamlessConfig.parse(self.config.get("seamless")).wait_for_machines_s
            self.machines = TagPools(plan, wait_s=wait_s).machines_by_node()
            self.node = runner_node(plan, ray.get_runtime_context().get_node_id(), cluster_nodes(), awaited=wait_s > 0)
        if self.node is not None:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(self.node.node_id, soft=False)
        given = ActorClassWith(task_runner_class(), variables=variables_of(self.config, os.environ))
        return given.options(**options)

    def lost(self, error: BaseException) -> ActorLostError:
        """The error of a run whose task runner died with this ACTOR_GONE: it names the node, where that is gone."""
        reason = last_line(error)
        if self.node is not None and self.node.node_id not in {node.node_id for node in cluster_nodes()}:
            reason = describe_loss(self.node, self.machines.get(self.node.node_id, ()))
        return ActorLostError("the task runner", reason)
