"""The sessions of a job's gateway: opened, recorded in the journal, and taken by the agent loop that opened them."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from seamless_verl.rollout.calls import Calls
from seamless_verl.trajectory.account import Account
from seamless_verl.trajectory.assemble import Limits, assemble
from seamless_verl.trajectory.journal import SqliteJournal
from seamless_verl.trajectory.policies import TrainAll
from seamless_verl.trajectory.sequences import TrainingSequence

KEPT_S = 7 * 24 * 3600.0  # a session that was trained can be read for so long,
KEPT_BYTES = 4 << 30  # or until the journal holds more than this


@dataclass(frozen=True)
class SessionSettings:
    """`options` are those of `vllm serve`; lengths in tokens bound what a session leaves to train."""

    model: str
    journal: str
    port: int = 0
    options: Sequence[str] = ()
    longest_prompt: int | None = None
    longest_response: int | None = None


@dataclass(frozen=True)
class FinishedSession:
    """What a session leaves: sequences to train, rewards by name, turns, and the account of its tokens."""

    sequences: list[TrainingSequence]
    rewards: dict[str, float]
    turns: int
    account: dict[str, float] = field(default_factory=dict)


class Sessions:
    """Owns the gateway, its journal and the account of all sessions' tokens."""

    def __init__(self, settings: SessionSettings, calls: Calls) -> None:
        # Here, not in every process that knows of the plane: vLLM's serving classes take seconds to import.
        from seamless_verl.gateway.journalled import JournalRecorder
        from seamless_verl.gateway.server import Gateway, GatewaySettings

        self.settings = settings
        self.journal = SqliteJournal(Path(settings.journal))
        self.ended: dict[str, asyncio.Event] = {}
        self.leaving: set[str] = set()
        self.account = Account()
        self.recorder = JournalRecorder(self.journal, on_closed=lambda session_id: self.ended[session_id].set())
        options = GatewaySettings(
            settings.model,
            secrets.token_urlsafe(),
            options=settings.options,
            host=ray.util.get_node_ip_address(),
            port=settings.port,
        )
        self.gateway = Gateway(options, source=calls, recorder=self.recorder)

    async def start(self) -> str:
        await self.gateway.start()
        return self.gateway.url

    async def stop(self) -> None:
        await self.gateway.stop()
        self.journal.close()

    async def open(self, body: dict[str, Any]) -> dict[str, Any]:
        opened = await self.gateway.admin.open(body)
        self.ended[opened["session_id"]] = asyncio.Event()
        return opened

    def forget(self) -> None:
        """Let the table drop sessions that have left, once the last request in them has been answered."""
        for session_id in [one for one in self.leaving if not self.gateway.table.get(one).running]:
            self.gateway.table.forget(session_id)
            self.leaving.remove(session_id)

    async def close(self, session_id: str, reason: str, version: int) -> FinishedSession:
        """What the session leaves, as the trainer of `version` sees it."""
        await self.gateway.admin.close(session_id, reason)
        await self.ended[session_id].wait()  # on record, also when it expired a moment ago
        del self.ended[session_id]
        record = self.recorder.take(session_id)
        await self.recorder.handed(session_id)  # to its agent loop, which waits and puts it into the queue
        self.leaving.add(session_id)
        self.forget()
        limits = Limits(self.settings.longest_prompt, self.settings.longest_response)
        assembly = assemble(record, TrainAll(), version, limits)
        self.account += assembly.account
        return FinishedSession(assembly.sequences, dict(record.rewards), len(record.turns), assembly.account.metrics())

    async def settle(self) -> dict[str, float]:
        """Metrics of all sessions' tokens, after their books have been found to close; old ones are compacted."""
        self.gateway.table.check_integrity()
        self.account.check_integrity()
        await self.journal.compact(time.time() - KEPT_S, KEPT_BYTES)
        return self.account.metrics()
