"""An agent loop of a resumed run has the outputs of the session that had ended, and runs no agent for it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.agent_loops import make_loop
from support.local_plane import Handle
from support.paths import DATA
from support.runner_plane import runner_plane

from seamless_verl.agent_loops import loops
from seamless_verl.agent_loops.group import GROUP, SessionGroup
from seamless_verl.agent_loops.loops import AgentFailedError
from seamless_verl.agent_loops.queue_writer import QueueWriter
from seamless_verl.data_plane.finished_sessions import HandedNote

pytestmark = pytest.mark.integration
LOOPS = "seamless_verl.agent_loops.loops"
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}


def loop_of(agent: str, **settings: Any) -> Any:
    entry = {"name": "mine", "_target_": f"{LOOPS}.CallableAgentLoop", "agent": f"{DATA / 'openai_agent.py'}:{agent}"}
    return make_loop(entry | {"time_limit_s": 5} | settings)


async def run(loop: Any, plane: Any, monkeypatch: pytest.MonkeyPatch, *, session: int = 0, step: int = 1) -> Any:
    handle = Handle(plane)
    monkeypatch.setattr(loops, "plane_for", lambda config, name: handle)
    prompt = np.array([{"role": "user", "content": "2+2="}], dtype=object)
    return await loop.run(SAMPLING, uid="u", session_id=session, global_steps=step, raw_prompt=prompt)


async def test_what_had_ended_is_not_run_again(nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    GROUP.set(SessionGroup(QueueWriter(), "u"))  # as our worker does
    journal = tmp_path / "journal.sqlite"
    async with asyncio.timeout(180):
        async with runner_plane(nano, journal) as plane:
            await plane.begin_run("a run", 0)
            first = await run(loop_of("run"), plane, monkeypatch)
            whole = await run(loop_of("run"), plane, monkeypatch, session=1)
            await whole.acknowledge(True, HandedNote("u", rewards={"reward": 9.0}))
            timed_out = await run(loop_of("stuck_after_a_call"), plane, monkeypatch, session=2)
        async with runner_plane(nano, journal) as plane:
            await plane.begin_run("a run", 1)
            for session, expected in enumerate((first, whole, timed_out)):
                again = await run(loop_of("fails"), plane, monkeypatch, session=session)
                assert [one.response_ids for one in again] == [one.response_ids for one in expected]
                assert [one.reward_score for one in again] == [one.reward_score for one in expected]
                assert again.failure == expected.failure and again.session_id == expected.session_id
                await again.acknowledge(True, HandedNote("u"))
            assert timed_out.failure == "timed_out" and plane.sessions is not None
            assert plane.sessions.accounts.total.generated == plane.sessions.accounts.total.trained > 0
            with pytest.raises(AgentFailedError):
                await run(loop_of("fails", failure_reward=None), plane, monkeypatch, session=3)
