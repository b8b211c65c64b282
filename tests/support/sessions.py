"""The sessions of one data plane's process over an engine without a model, and what its agents do."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from seamless_verl.data_plane.finished_sessions import FinishedSession
from seamless_verl.data_plane.sessions import Sessions
from seamless_verl.data_plane.settings import SessionSettings
from seamless_verl.rollout.call import Calls
from seamless_verl.rollout.fleet import Fleet
from seamless_verl.tools.bench.stub_engine import StubEngine

BODY: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
FAILURES: list[BaseException] = []


@asynccontextmanager
async def sessions(
    nano: Path, journal: Path, *, restarted: bool, version: int = 0, delay_s: float = 0.0
) -> AsyncGenerator[Sessions, None]:
    """The sessions of one process; those not closed in it stay open in the journal, as after a death."""
    fleet = Fleet(committed=version)
    stub = StubEngine("a", vocabulary=128, delay_s=delay_s)
    stub.version = version
    fleet.add("a", engine=stub, control=stub, capacity=8, version=version)
    options = ("--served-model-name", "policy")
    settings = SessionSettings(str(nano / "model"), str(journal), "admin-key", options=options)
    started = Sessions(settings, Calls(fleet), on_failure=FAILURES.append)
    await started.start(await started.read_journal(), restarted=restarted)
    try:
        yield started
    finally:
        await started.stop()


async def complete_chat(opened: dict[str, Any]) -> None:
    async with httpx.AsyncClient(timeout=30) as http:
        reply = await http.post(f"{opened['base_url']}/chat/completions", json=BODY)
        assert reply.status_code == 200, reply.text


def comparable(session: FinishedSession) -> list[Any]:
    parts = [
        [
            getattr(sequence, name).tolist()
            for name in ("prompt_ids", "response_ids", "response_mask", "rollout_log_probs")
        ]
        for sequence in session.sequences
    ]
    return [parts, session.rewards, session.turns, session.account]
