"""verl's manager of agent loops, with our workers; a worker that died is started again, and its prompts begin again.

The trainer's threads give prompts and defer them, the watchdog's starts workers again; one lock orders these.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any
from uuid import uuid4

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.experimental.agent_loop import agent_loop
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ

from seamless_verl.agent_loops.assignments import Assignments, LostPrompts, RestartLimit, column, unended_prompts
from seamless_verl.agent_loops.worker import STOP_S, SeamlessAgentLoopWorker
from seamless_verl.platform.adaptation import ActorClassWith
from seamless_verl.runtime.actor_death import ACTOR_GONE, last_line

logger = logging.getLogger(__name__)


class SeamlessAgentLoopManager(AgentLoopManagerTQ):  # type: ignore[misc]
    """verl's manager with our worker class; `may_begin` calls what it is given when generation may begin.

    `begin_watch` sets `restarts` and `lost`; before it, and with a limit of 0, no worker is started again.
    """

    may_begin: Callable[[Callable[[], None]], None]
    restarts = RestartLimit(0)
    lost: LostPrompts | None = None
    restarted = 0  # workers, of the whole run

    def __init__(self, *args: Any, variables: Mapping[str, str] = MappingProxyType({}), **kwargs: Any) -> None:
        """`variables` of the command's environment are for all workers."""
        super().__init__(*args, **kwargs)
        worker_class = ray.remote(SeamlessAgentLoopWorker)
        self.agent_loop_workers_class = ActorClassWith(worker_class, variables=dict(variables))
        self.may_begin = lambda begin: begin()
        self.assignments, self.lock = Assignments(), threading.RLock()
        self.sent: defaultdict[int, list[Any]] = defaultdict(list)  # calls that give prompts, by worker, until answered

    def generate_sequences(self, prompts: Any) -> None:
        """Gives the prompts to the workers, at once or, in another thread, when they may begin."""
        self.may_begin(partial(self._give, prompts))

    def _give(self, prompts: Any) -> None:
        """As verl's `generate_sequences`; what a dead worker was given, the one in its place gets."""
        with self.lock:
            if self.watched and len(self.assignments.by_uid) + len(prompts) > self.assignments.full:
                self.assignments.prune({*unended_prompts(), *map(str, column(prompts, "uid"))})
            chunks = prompts.chunk(len(self.agent_loop_workers))
            calls = {number: self._send(number, chunk) for number, chunk in enumerate(chunks)}
        self._await(calls)

    def _send(self, number: int, batch: Any, deaths: Mapping[str, int] | None = None) -> tuple[Any, Any]:
        """Gives a batch to a worker; returns it with the call."""
        if self.watched:
            self.assignments.add(number, batch, deaths)
        worker = self.agent_loop_workers[number]
        call = worker.generate_sequences.remote(batch)
        self.sent[number] = [*ray.wait(self.sent[number], num_returns=len(self.sent[number]), timeout=0)[1], call]
        return worker, call

    def _await(self, calls: Mapping[int, tuple[Any, Any]]) -> set[int]:
        """Waits for calls of workers; returns whose were done. One that died is for `begin_again`, or ends the run."""
        done = set[int]()
        for number, (worker, call) in calls.items():
            try:
                ray.get(call)
                done.add(number)
            except ray.exceptions.ActorUnavailableError:  # it may live, and have lost the call
                if not self.watched:
                    raise
                ray.kill(worker)
            except ACTOR_GONE as error:
                if not self.watched:
                    raise
                logger.warning("agent loop worker %d is gone: %s", number, last_line(error))
        return done

    @property
    def watched(self) -> bool:
        """Whether workers that die are started again."""
        return self.lost is not None and self.restarts.limit > 0

    def begin_watch(self, limit: int, planes: Sequence[Any]) -> None:
        """Workers may be started again so often; `planes` are the data planes."""
        self.restarts, self.lost = RestartLimit(limit), LostPrompts(self.assignments, planes)

    def begin_again(self, number: int) -> None:
        """Starts another worker in the place of this dead one, without a wait for it; it gets what had not ended."""
        assert self.lost is not None
        with self.lock:
            self.agent_loop_workers[number] = self._start_worker(number)
            self.sent.pop(number, None)
            batches, deaths = self.lost.end(number)
            for batch in batches:
                self._send(number, batch, deaths)
            self.restarted += 1

    def _start_worker(self, number: int) -> Any:
        """As verl starts one, on one of the nodes that it chooses from which are alive now."""
        found = agent_loop.ray.nodes()  # which `trainer/needed_nodes.py` replaces
        nodes = [node["NodeID"] for node in found if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
        options = {
            "name": f"agent_loop_worker_{number}_{uuid4().hex[:8]}",
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=nodes[number % len(nodes)], soft=True),
        }
        started = self.agent_loop_workers_class.options(**options)
        return started.remote(self.config, self.llm_client, self.teacher_client, self.reward_loop_worker_handles)

    def end_stuck(self, uid: str, session_id: str, reason: str) -> None:
        """As `SessionGroup.end_stuck`, in the worker that has this group; does not wait for agents to end."""
        for worker in self.agent_loop_workers:
            worker.end_stuck.remote(uid, session_id, reason)

    def reopening(self, uids: Collection[str]) -> None:
        """The groups of these prompts have ended, and are given again as other parts of them."""
        with self.lock:
            self.assignments.forget(uids)

    def defer(self, uids: Collection[str]) -> None:
        """Ends the groups of these prompts that still run; a dead worker's are not begun again."""
        with self.lock:
            self.assignments.defer(uids)
            sent = [call for calls in self.sent.values() for call in calls]
        if sent:  # a worker that has just started would else hear of the end before the begin
            ray.wait(sent, num_returns=len(sent), timeout=STOP_S)
        with self.lock:
            calls = {
                number: (worker, worker.defer.remote(uids)) for number, worker in enumerate(self.agent_loop_workers)
            }
        done = self._await(calls)
        with self.lock:
            for number in done:
                self.assignments.ended(number)

    def metrics(self) -> dict[str, float]:
        """Of the whole run, where workers are started again."""
        return {"loop_workers/restarted": float(self.restarted)} if self.watched else {}

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
