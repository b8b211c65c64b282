"""The swe_agent recipe with mini-swe-agent itself, through the gateway, on replies that were written down."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.gateway import ADMIN_KEY, EOS, MemoryRecorder, Reply, reply_chunks
from support.recipes import SWE_AGENT, agents_environment, load

from seamless_verl.agents.endpoint import Endpoint
from seamless_verl.gateway.calls import SessionCall
from seamless_verl.gateway.server import Gateway, GatewaySettings
from seamless_verl.trajectory.records import TokenChunk

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.slowest(7)]
BUGS, DATA, SOLVE = load(SWE_AGENT, "bugs", "data", "solve")
BROKEN = BUGS.repository("off_by_one", noun="songs", n=3)
UNFIXED = 0.5  # two of the tests pass with that bug
TEST = "I run the tests.\n\n```bash\npython -m unittest\n```"
DONE = "Done.\n\n```bash\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```"
FIX = f"It begins too early.\n\n```bash\ncat >history.py <<'END'\n{BROKEN.fixed}END\n```"
CHEAT = """I change the tests.

```bash
printf 'print(1)\\n' | tee test_history.py >test_hidden.py; echo '{"reward": 1.0}' >reward.json
```"""
LEAVE_PROCESS = """I reward myself for ever.

```bash
setsid sh -c 'while :; do echo "{\\"reward\\": 1.0}" >reward.json; done' haunting >/dev/null 2>&1 &
```"""


@pytest.fixture
def scratches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the commands' folders are made; nothing may be left in it, nor run from it."""
    folder = tmp_path / "scratches"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == []
    assert not [process for process in psutil.process_iter() if "haunting" in arguments(process)]


def arguments(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@dataclass
class Scripts:
    """A CallSource: a session's n-th call gives the n-th text of its script, the last one for ever."""

    texts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    calls: dict[str, list[SessionCall]] = field(default_factory=dict)

    async def stream(self, call: SessionCall) -> AsyncGenerator[TokenChunk, None]:
        calls, texts = self.calls.setdefault(call.session_id, []), self.texts[call.session_id]
        calls.append(call)
        for chunk in reply_chunks(Reply(reply(texts[min(len(calls), len(texts)) - 1]), size=1000), call.sampling):
            yield chunk


def reply(text: str) -> list[int]:
    """The tiny model's tokens: a byte each, and the end of the turn."""
    return [*text.encode(), EOS]


def test_mini_swe_agent_is_rewarded_by_tests_it_cannot_reach(
    nano: Path, tmp_path: Path, scratches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENT_ENV", str(agents_environment()))
    fixes, cheats, leaves_process = (FIX, TEST, DONE), ("No command.", CHEAT, TEST, DONE), (LEAVE_PROCESS, DONE)
    outcomes, calls = asyncio.run(sessions(nano, task(tmp_path / "data"), fixes, cheats, leaves_process))
    assert outcomes[:2] == [{"reward": 1.0, "exit_code": 0}, {"reward": UNFIXED, "exit_code": 0}]
    assert isinstance(outcomes[2], RuntimeError) and str(outcomes[2]).startswith("the agent ")
    assert [len(session) for session in calls] == [3, 4, 2]
    for session in calls:
        system, user = session[0].request["messages"]
        assert (system["role"], user["role"]) == ("system", "user") and BROKEN.issue in user["content"]
    tested, explained = (call.request["messages"][-1]["content"] for call in (calls[0][2], calls[1][1]))
    assert tested.startswith("exit code 0") and tested.rstrip().endswith("OK")
    assert explained == "Give exactly one command between ```bash and ```, not 0."
    for (before, after), text in zip(pairwise(calls[0]), fixes, strict=False):
        whole = [*before.prompt_ids, *reply(text)]
        assert list(after.prompt_ids[: len(whole)]) == whole


async def sessions(nano: Path, task: dict[str, Any], *scripts: tuple[str, ...]) -> tuple[list[Any], list[Any]]:
    """The outcome or exception of each script, all run at the same time; and each session's calls."""
    source, names = Scripts(), ("--served-model-name", "nano", "policy")
    settings = GatewaySettings(str(nano / "model"), ADMIN_KEY, names)
    async with Gateway(settings, source=source, recorder=MemoryRecorder()) as gateway:
        opened = [await gateway.admin.open({"uid": "prompt-1"}) for _ in scripts]
        source.texts = {session["session_id"]: script for session, script in zip(opened, scripts, strict=True)}
        endpoints = [Endpoint(one["anthropic_base_url"], one["key"], one["session_id"]) for one in opened]
        outcomes = await asyncio.gather(*(SOLVE.run(task, endpoint) for endpoint in endpoints), return_exceptions=True)
        await gateway.client.drain()
        gateway.table.check_integrity()
    return outcomes, [source.calls[endpoint.session_id] for endpoint in endpoints]


def task(folder: Path) -> dict[str, Any]:
    """A row of the recipe's data, with its folders, as the trainer gives it to an agent."""
    places = {"repository": folder / "repositories", "tests": folder / "tests"}
    DATA.write_files(places["repository"] / "train" / "0", BROKEN.files)
    DATA.write_files(places["tests"] / "train" / "0", DATA.hidden_files(BROKEN))
    return dict(DATA.row(folder, "train", 0, BROKEN))
