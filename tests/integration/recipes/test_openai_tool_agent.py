"""The tool agent's recipe as a user runs it, for two steps: tools are called, and all of it is on record.

Its metrics are those of docs/metrics.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from support.metric_names import unlisted
from support.paths import RECIPES
from transformers import AutoTokenizer

from seamless_verl.journal import JournalReader, StoredSession

pytestmark = [pytest.mark.integration, pytest.mark.long]
RECIPE = RECIPES / "openai_tool_agent"
SHORT = (
    "trainer.total_training_steps=2",
    "trainer.test_freq=2",
    "trainer.save_freq=-1",
    "trainer.logger=[console,file]",
    "data.train_batch_size=4",
    "data.val_max_samples=8",
    "actor_rollout_ref.rollout.n=4",
)
SESSIONS = 2 * 4 * 4 + 2 * 8


def test_the_recipe_calls_its_tool_and_trains(tmp_path: Path) -> None:
    output, metrics = train(tmp_path)
    assert "validation curve: val-" in output
    assert metrics.keys() == {0, 1, 2}
    for step in (1, 2):
        now = metrics[step]
        dropped = sum(value for name, value in now.items() if name.startswith("tokens/dropped/"))
        assert now["tokens/generated"] == now["tokens/trained"] + dropped > 0
        assert now["calls/failed"] == now["calls/cancelled"] == 0
        assert now["actor/grad_norm"] > 0
        assert unlisted(now) == set()
    [journal] = (tmp_path / "data").glob("checkpoints/*/trajectories.sqlite")
    reader = JournalReader(journal)
    finished = [one for one in reader.sessions() if one.reason == "finished"]
    records = [record for one in finished if (record := reader.read(one.session_id)) is not None]
    assert len(records) == len(finished) >= SESSIONS
    check_calls(records, tmp_path / "data" / "model")


def train(folder: Path) -> tuple[str, dict[int, dict[str, float]]]:
    """run.sh after a warm start too short for right answers; its output, and what it logged by step."""
    env = os.environ | {
        "PYTHON": sys.executable,
        "PYTHONWARNINGS": "ignore",
        "VERL_PLATFORM": "cpu",
        "DATA": str(folder / "data"),
        "WARM_STEPS": "100",
        "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"),
    }
    done = subprocess.run(
        [RECIPE / "run.sh", *SHORT], cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout[-6000:]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return done.stdout, {row["step"]: row["data"] for row in rows}


def check_calls(records: list[StoredSession], model: Path) -> None:
    """The tool is called and its results come back; each prompt is the tokens before it and what is new."""
    tokenizer, called = AutoTokenizer.from_pretrained(model), 0
    for record in records:
        asked = record.calls[0].request
        opening = {"tools": asked["tools"], "tokenize": False, "add_generation_prompt": True}
        text = tokenizer.apply_chat_template(asked["messages"], **opening)
        assert list(record.calls[0].prompt_ids) == tokenizer.encode(text, add_special_tokens=False)
        for call, following in pairwise(record.calls):
            whole = call.prompt_ids + call.turn().generated_ids
            assert following.prompt_ids[: len(whole)] == whole
            assert "<tool_response>" in tokenizer.decode(following.prompt_ids[len(whole) :])
            called += 1
    assert called > len(records) / 4, f"{called} calls of the tool in {len(records)} sessions"
