"""How far a simulated run goes ahead: as it is told, or found by the object with which a real run finds it."""

from __future__ import annotations

from dataclasses import dataclass

from seamless_verl.resources.ahead import AheadLevel, EngineUse
from seamless_verl.resources.lending.policy import Tag
from seamless_verl.tools.simulator.cluster import VirtualCluster
from seamless_verl.tools.simulator.device import SimulatedUse
from seamless_verl.tools.simulator.scenario import Scheduler


@dataclass(frozen=True)
class SimulatedLoad:
    """A simulated engine at one moment, as `EngineUse` sees a real one."""

    replica_id: str
    running: int
    seats: int
    generated: float
    serves: bool


class AheadControl:
    """Looks at the cluster's engines while training waits for groups, where the scheduler finds how far to go."""

    def __init__(self, cluster: VirtualCluster, scheduler: Scheduler) -> None:
        self.cluster, self.given = cluster, scheduler.batches_ahead
        self.level = AheadLevel(scheduler.max_staleness) if scheduler.finds_ahead else None
        self.use = EngineUse()
        self.generating = [device for device in cluster.devices if Tag.ROLLOUT in device.tags]
        self.generated: dict[str, float] = {}
        self.step_began = self.looked = self.idle_s = 0.0

    @property
    def batches(self) -> float:
        """Steps' worth of prompts outstanding beyond the current step's."""
        return self.given if self.level is None else self.level.level

    def look(self) -> None:
        """While training waits for groups."""
        if self.level is None or not self.use.due(self.cluster.now):
            return
        seconds, self.looked = self.cluster.now - self.looked, self.cluster.now
        loads = []
        for device in self.cluster.devices:
            if not device.away:
                engine = device.engine
                tokens = self.generated.get(device.name, 0.0) + device.rate * seconds
                self.generated[device.name] = tokens
                loads.append(SimulatedLoad(device.name, engine.running, engine.seats, tokens, device.serving))
        self.use.look(loads, self.cluster.waiting, self.cluster.now, self.level.level)

    def wait_ended(self) -> None:
        self.use.wait_ended()

    def step_ended(self) -> None:
        now, lost, idle_s = self.cluster.now, self.use.take(), self._idle_s()
        if self.level is not None:
            step_s = now - self.step_began
            device_s = step_s * len(self.generating)
            self.level.step_ended(step_s, lost, (idle_s - self.idle_s) / device_s if device_s else 0.0)
        self.step_began, self.idle_s = now, idle_s

    def _idle_s(self) -> float:
        """Of the devices that generate, up to now."""
        self.cluster.count_up_to_now(self.generating)
        return sum(device.seconds[SimulatedUse.IDLE] for device in self.generating)
