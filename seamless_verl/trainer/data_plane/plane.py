"""The actor that runs the gateway, the fleet behind it and the journal.

Owned state: all of these; the trainer commands it, agent loops open and close sessions in it. The
fleet's replicas are the job's; what they serve is the version that the trainer committed last.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from seamless_verl.errors import ReplicaLostError
from seamless_verl.rollout.calls import Calls
from seamless_verl.rollout.engine import PauseMode
from seamless_verl.rollout.fleet import Fleet
from seamless_verl.rollout.routing import PrefixAffinity
from seamless_verl.rollout.states import ReplicaState
from seamless_verl.rollout.wire import RemoteEngine
from seamless_verl.trainer.replica.server import ActorControl
from seamless_verl.trajectory.account import Account
from seamless_verl.trajectory.assemble import Limits, assemble
from seamless_verl.trajectory.journal import SqliteJournal
from seamless_verl.trajectory.policies import TrainAll
from seamless_verl.trajectory.sequences import TrainingSequence

KEPT_S = 7 * 24 * 3600.0  # a session that was trained can be read for so long,
KEPT_BYTES = 4 << 30  # or until the journal holds more than this
logger = logging.getLogger(__name__)
NAME = "seamless_data_plane"  # of the actor, in the job's namespace


@dataclass(frozen=True)
class PlaneSettings:
    """`options` are those of `vllm serve`; `capacity` calls at once on one replica."""

    model: str
    journal: str
    token: str
    port: int = 0
    options: Sequence[str] = ()
    capacity: int = 256
    longest_prompt: int | None = None
    longest_response: int | None = None


@dataclass(frozen=True)
class FinishedSession:
    """What a session leaves: sequences to train, rewards by name, turns, and the account of its tokens."""

    sequences: list[TrainingSequence]
    rewards: dict[str, float]
    turns: int
    account: dict[str, float] = field(default_factory=dict)


class DataPlane:
    """A plain class, made an actor where it is started."""

    def __init__(self, settings: PlaneSettings) -> None:
        # Here, not in every process that knows of the plane: vLLM's serving classes take seconds to import.
        from seamless_verl.gateway.journalled import JournalRecorder
        from seamless_verl.gateway.server import Gateway, GatewaySettings

        self.settings = settings
        self.fleet = Fleet(policy=PrefixAffinity())
        self.calls = Calls(self.fleet)
        self.journal = SqliteJournal(Path(settings.journal))
        self.ended: dict[str, asyncio.Event] = {}
        self.leaving: set[str] = set()
        self.account = Account()
        self.recorder = JournalRecorder(self.journal, on_closed=lambda session_id: self.ended[session_id].set())
        self.admin_key = secrets.token_urlsafe()
        options = GatewaySettings(
            settings.model,
            self.admin_key,
            options=settings.options,
            host=ray.util.get_node_ip_address(),
            port=settings.port,
        )
        self.gateway = Gateway(options, source=self.calls, recorder=self.recorder)

    async def start(self) -> str:
        """Listen; returns the address, without a slash at its end."""
        await self.gateway.start()
        return self.gateway.url

    async def stop(self) -> None:
        """End what runs, and make all of it durable."""
        await self.gateway.stop()
        for replica_id in list(self.fleet):
            await self.fleet.remove(replica_id)
        self.journal.close()

    async def attach(self, replica_id: str, host: str, port: int, actor: Any) -> None:
        """A replica that listens; it serves after the next commit."""

        def lost(reason: str) -> None:
            logger.warning("replica %s is lost: %s", replica_id, reason)
            self.fleet.lost(replica_id, reason)

        token = self.settings.token
        engine = await RemoteEngine.connect(host, port, token=token, replica_id=replica_id, on_lost=lost)
        control = ActorControl(replica_id, actor)
        self.fleet.add(replica_id, engine=engine, control=control, capacity=self.settings.capacity)

    async def pause(self) -> None:
        """Cut what runs on every replica; calls wait."""
        await self.fleet.pause(self.those(ReplicaState.SERVING), PauseMode.ABORT)

    async def begin_sync(self) -> None:
        """Before new weights are loaded into every replica."""
        await self.pause()
        await self.fleet.begin_sync(self.those(ReplicaState.PAUSED, ReplicaState.STALE))

    async def synced(self, version: int) -> None:
        """Every replica has the weights of `version`, which is committed.

        Raises:
            ReplicaLostError: none serves, so that every call would wait for ever.
        """
        self.fleet.commit(version)
        await self.fleet.synced(self.those(ReplicaState.SYNCING), version)
        await self.journal.compact(time.time() - KEPT_S, KEPT_BYTES)
        if not self.those(ReplicaState.SERVING):
            raise ReplicaLostError(", ".join(self.fleet), f"no replica serves version {version}")

    def those(self, *states: ReplicaState) -> list[str]:
        return [view.replica_id for view in self.fleet.view if view.state in states]

    async def open(self, body: dict[str, Any]) -> dict[str, Any]:
        """A session; `body` as POST /admin/sessions takes it."""
        opened = await self.gateway.admin.open(body)
        self.ended[opened["session_id"]] = asyncio.Event()
        return opened

    def forget(self) -> None:
        """Let the table drop sessions that have left, once the last request in them has been answered."""
        for session_id in [one for one in self.leaving if not self.gateway.table.get(one).running]:
            self.gateway.table.forget(session_id)
            self.leaving.remove(session_id)

    async def close(self, session_id: str, reason: str) -> FinishedSession:
        """End a session and take what it leaves."""
        await self.gateway.admin.close(session_id, reason)
        await self.ended[session_id].wait()  # on record, also when it expired a moment ago
        del self.ended[session_id]
        record = self.recorder.take(session_id)
        await self.recorder.handed(session_id)  # to its agent loop, which waits and puts it into the queue
        self.leaving.add(session_id)
        self.forget()
        limits = Limits(self.settings.longest_prompt, self.settings.longest_response)
        assembly = assemble(record, TrainAll(), self.fleet.committed, limits)
        self.account += assembly.account
        return FinishedSession(assembly.sequences, dict(record.rewards), len(record.turns), assembly.account.metrics())

    async def check_integrity(self) -> dict[str, float]:
        """Metrics of the fleet, its calls and all sessions' tokens, after their books have been found to close."""
        self.fleet.check_integrity()
        self.calls.check_integrity()
        self.gateway.table.check_integrity()
        self.account.check_integrity()
        return self.fleet.metrics() | self.calls.metrics() | self.account.metrics()
