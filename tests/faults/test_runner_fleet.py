"""Two hundred runners, of which a third is killed at random: every task is done once, and trained once."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from support.paths import DATA, ROOT
from support.runner_plane import RUNNER_KEY, finish, order, runner_plane

from seamless_verl.data_plane.finished_sessions import FinishedSession
from seamless_verl.data_plane.lease_book import DONE, TaskOrder
from seamless_verl.journal import JournalReader, Stage

pytestmark = [pytest.mark.integration, pytest.mark.long]
RUNNERS, KILLED, TASKS, LEASE_S = 200, 67, 400, 20.0
FLEET = Path(__file__).parents[1] / "support" / "runner_fleet.py"


@asynccontextmanager
async def fleet(url: str, count: int) -> AsyncGenerator[list[int], None]:
    """The process ids of the runners; none is left at the end."""
    env = os.environ | {"SEAMLESS_RUNNER_KEY": RUNNER_KEY, "PYTHONPATH": str(ROOT)}
    arguments = ["--connect", url, "--agent", f"{DATA / 'runner_agent.py'}:run"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(FLEET), str(count), *arguments),
        env=env,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdout is not None
    runners: list[int] = []
    try:
        for _ in range(count):
            runners.append(int(await process.stdout.readline()))
        yield runners
    finally:
        for runner in runners:
            with suppress(ProcessLookupError):  # it was killed before
                os.kill(runner, signal.SIGKILL)
        await process.wait()


async def test_a_third_of_the_runners_is_killed(nano: Path, tmp_path: Path) -> None:
    journal, chance = tmp_path / "journal.sqlite", random.Random(7)
    trained: Counter[str] = Counter()
    attempts: Counter[int] = Counter()
    async with asyncio.timeout(400), runner_plane(nano, journal) as plane:
        assert plane.sessions is not None

        async def train(task: TaskOrder) -> FinishedSession:
            result = await plane.run_task(task)
            assert result.state is DONE, result
            attempts[result.attempts] += 1
            trained[task.task_id] += 1
            return await finish(plane, result)

        async with fleet(plane.sessions.gateway.url, RUNNERS) as runners:
            tasks = [
                asyncio.create_task(train(order(number, lease_s=LEASE_S, max_attempts=50))) for number in range(TASKS)
            ]
            victims = chance.sample(runners, KILLED)
            pending = set(tasks)
            while victims:  # one after each few results, so that they die at all stages of their work
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for _ in done:
                    if victims and chance.random() < 0.4:
                        os.kill(victims.pop(), signal.SIGKILL)
            sessions = await asyncio.gather(*tasks)
        metrics = await plane.metrics()
    assert len(trained) == TASKS and set(trained.values()) == {1}
    assert sum(count for tries, count in attempts.items() if tries > 1) > 0, "no runner died with a task"
    reader = JournalReader(journal)
    events = reader.outside_events()
    kinds = Counter(event.kind for event in events)
    again = kinds["lost"] + kinds["given back"]  # the second: killed while the lease was on its way
    assert kinds["done"] == TASKS and kinds["leased"] == TASKS + again, kinds
    assert len({event.detail["task"] for event in events if event.kind == "done"}) == TASKS
    on_record = reader.sessions()
    reasons = Counter(session.reason for session in on_record)
    assert reasons == {"finished": TASKS, "runner_lost": again}
    assert {session.stage for session in on_record} == {Stage.HANDED}
    assert metrics["tokens/generated"] == sum(session.tokens for session in on_record)
    assert metrics["tokens/trained"] == sum(int(s.response_mask.sum()) for each in sessions for s in each.sequences)
    # a runner that is killed while it waits for a reply cancels that call: its tokens have a reason of their own
    dropped = {name: tokens for name, tokens in metrics.items() if name.startswith("tokens/dropped/") and tokens}
    assert dropped.keys() <= {"tokens/dropped/runner_lost", "tokens/dropped/cancelled"}, dropped
    assert metrics["tokens/trained"] + sum(dropped.values()) == metrics["tokens/generated"]
    sys.stdout.write(f"\n{dict(kinds)} attempts {dict(attempts)} {metrics}\n")
