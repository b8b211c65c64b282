"""The swe_agent recipe with mini-swe-agent itself, on replies that were written down; no engine and no trainer."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from recipe_cases import SWE_AGENT, agents_environment, load
from scripted_model import ScriptedModel, served

from seamless_verl.agents.endpoint import Endpoint

pytestmark = pytest.mark.integration
BUGS, DATA, SOLVE = load(SWE_AGENT, "bugs", "data", "solve")
BROKEN = BUGS.repository("off_by_one", noun="songs", n=3)
AS_IT_WAS = 0.5  # two of the tests pass with that bug
TEST = "I run the tests.\n\n```bash\npython -m unittest\n```"
DONE = "Done.\n\n```bash\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```"
MEND = f"It begins too early.\n\n```bash\ncat >history.py <<'END'\n{BROKEN.fixed}END\n```"
CHEAT = """I change the tests.

```bash
printf 'print(1)\\n' | tee test_history.py >test_hidden.py; echo '{"reward": 1.0}' >reward.json
```"""
HAUNT = """I reward myself for ever.

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


def test_mini_swe_agent_is_rewarded_by_tests_it_cannot_reach(
    tmp_path: Path, scratches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENT_ENV", str(agents_environment()))
    scripts = {"mends": [MEND, TEST, DONE], "cheats": ["No command.", CHEAT, TEST, DONE], "haunts": [HAUNT, DONE]}
    with served(ScriptedModel(scripts)) as model:
        mended, cheated, haunted = asyncio.run(sessions(task(tmp_path / "data"), model))
    assert mended == {"reward": 1.0, "exit_code": 0}
    assert cheated == {"reward": AS_IT_WAS, "exit_code": 0}
    assert isinstance(haunted, RuntimeError)
    check_talk(model)


async def sessions(task: dict[str, Any], model: ScriptedModel) -> list[Any]:
    """What each script comes to, all at the same time; an exception is what it is."""
    runs = [SOLVE.run(task, Endpoint(model.url, key, key)) for key in model.replies]
    return await asyncio.gather(*runs, return_exceptions=True)


def task(folder: Path) -> dict[str, Any]:
    """A row of the recipe's data, with its folders, as the trainer gives it to an agent."""
    places = {"repository": folder / "repositories", "tests": folder / "tests"}
    DATA.write_files(places["repository"] / "train" / "0", BROKEN.files)
    DATA.write_files(places["tests"] / "train" / "0", DATA.hidden(BROKEN))
    return DATA.row(folder, "train", 0, BROKEN)


def check_talk(model: ScriptedModel) -> None:
    """The issue is in the first request, what a command printed in the next; a bad reply is explained."""
    for asked in model.requests.values():
        assert {request["model"] for request in asked} == {"policy"}
        system, user = asked[0]["messages"]
        assert (system["role"], user["role"]) == ("system", "user") and BROKEN.issue in user["content"]
    said = {key: [request["messages"][-1]["content"] for request in asked] for key, asked in model.requests.items()}
    assert said["mends"][2].startswith("exit code 0") and said["mends"][2].rstrip().endswith("OK")
    assert said["cheats"][1] == "Give exactly one command between ```bash and ```, not 0."
    assert [len(asked) for asked in said.values()] == [3, 4, 2]
