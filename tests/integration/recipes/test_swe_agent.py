"""The swe_agent recipe as a user runs it, for one step: mini-swe-agent runs, is rewarded and trained."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.recipes import SWE_AGENT, agents_environment

from seamless_verl.journal import JournalReader, StoredSession

pytestmark = [pytest.mark.integration, pytest.mark.long]


def test_the_recipe_trains_a_step(tmp_path: Path) -> None:
    """The tiny model's replies are no commands; the agent says so, and gives up after the second."""
    metrics = train(tmp_path)
    assert metrics.keys() == {1}
    now = metrics[1]
    dropped = sum(value for name, value in now.items() if name.startswith("tokens/dropped/"))
    assert now["tokens/generated"] == now["tokens/trained"] + dropped > 0
    assert now["calls/failed"] == now["calls/cancelled"] == dropped == 0
    assert now["actor/grad_norm"] > 0
    assert 0 < now["critic/rewards/min"] < now["critic/rewards/max"] < 1
    [journal] = (tmp_path / "data").glob("checkpoints/*/trajectories.sqlite")
    reader = JournalReader(journal)
    finished = [one for one in reader.sessions() if one.reason == "finished"]
    records = [record for one in finished if (record := reader.read(one.session_id)) is not None]
    assert len(records) == len(finished) >= 2 * 4
    for record in records:
        check_session(record)


def train(folder: Path) -> dict[int, dict[str, float]]:
    """run.sh for one step; what it logged, by step."""
    env = os.environ | {
        "PYTHON": sys.executable,
        "PYTHONWARNINGS": "ignore",
        "VERL_PLATFORM": "cpu",
        "DATA": str(folder / "data"),
        "AGENT_ENV": str(agents_environment()),
        "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"),
    }
    short = ["trainer.total_training_steps=1", "trainer.logger=[console,file]"]
    done = subprocess.run(
        [SWE_AGENT / "run.sh", *short], cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout[-6000:]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["data"] for row in rows}


def check_session(record: StoredSession) -> None:
    """Two calls, the second with the agent's complaint in place of the reply it could not read."""
    first, second = record.calls
    asked, again = first.request["messages"], second.request["messages"]
    assert again[:-1] == asked and again[-1]["content"].startswith("Give exactly one command")
    assert "in the repository" in asked[1]["content"]
    assert all(0 < len(call.turn().generated_ids) <= 128 for call in record.calls)
