"""The recipes' scripts as modules, and whole runs of a recipe as a user starts them, for their tests."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from seamless_verl.journal import JournalReader, StoredCall, StoredSession
from support.paths import RECIPES, ROOT

SWE_AGENT = RECIPES / "swe_agent"


def load(recipe: Path, *names: str) -> list[ModuleType]:
    """The recipe's modules, which import one another by these plain names; the names are free again after."""
    before = {name: sys.modules.pop(name, None) for name in names}
    sys.path.insert(0, str(recipe))
    try:
        return [importlib.import_module(name) for name in names]
    finally:
        sys.path.remove(str(recipe))
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


def agents_environment() -> Path:
    """The environment of the swe_agent recipe's agents, where a run of the recipe has it; made when it is missing."""
    where = Path(os.environ.get("AGENT_ENV") or ROOT / "runs" / "swe_agent" / "agent-venv")
    subprocess.run([SWE_AGENT / "setup.sh", where], env=os.environ | {"PYTHON": sys.executable}, check=True)
    return where


def agents_folder() -> str:
    """The folder with `claude`, `codex` and the Agents SDK's Python; made from the lock file when it is missing."""
    made = subprocess.run([ROOT / "scripts" / "agents"], stdout=subprocess.PIPE, text=True, check=True)
    return made.stdout.strip()


def train(recipe: str, folder: Path, *overrides: str, **variables: str) -> RecipeRun:
    """run.sh of the recipe, to its end; on-policy, so that the trainer's logprobs are of the same weights."""
    env = os.environ | {
        "PYTHON": sys.executable,
        "PYTHONWARNINGS": "ignore",
        "VERL_PLATFORM": "cpu",
        "DATA": str(folder / "data"),
        "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"),
    }
    words = [RECIPES / recipe / "run.sh", "trainer.logger=[console,file]", "seamless.max_staleness=0", *overrides]
    done = subprocess.run(
        words, cwd=folder, env=env | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout[-6000:]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    [journal] = (folder / "data").glob("checkpoints/**/trajectories.sqlite")
    return RecipeRun(done.stdout, {row["step"]: row["data"] for row in rows}, JournalReader(journal))


@dataclass(frozen=True)
class RecipeRun:
    """What a run printed, what it logged by step, and its journal."""

    output: str
    metrics: dict[int, dict[str, float]]
    journal: JournalReader

    def records(self) -> list[StoredSession]:
        records = [self.journal.read(one.session_id) for one in self.journal.sessions()]
        return [record for record in records if record is not None]

    def check_trained(self, steps: int, logprob_error: float) -> None:
        """What `check_counts` says, and each step had a gradient.

        The trainer's logprobs are the recorded ones to within `logprob_error`, those of tokens under a grammar, too.
        """
        for now in self.metrics.values():
            assert now["actor/grad_norm"] > 0
            assert now["seamless/agreement/plain/tokens"] > 0
            for kind in ("plain", "grammar"):
                assert now.get(f"seamless/agreement/{kind}/max", 0.0) < logprob_error
        self.check_counts(steps)

    def check_counts(self, steps: int) -> None:
        """All steps were made; every call and token is in the journal, and is trained or dropped with a reason."""
        assert self.metrics.keys() == set(range(1, steps + 1))
        for now in self.metrics.values():
            dropped = sum(value for name, value in now.items() if name.startswith("tokens/dropped/"))
            assert now["tokens/generated"] == now["tokens/trained"] + dropped > 0
            assert now["calls/failed"] == now["calls/cancelled"] == now["calls/running"] == 0
        self.journal.check_integrity()
        calls = [call for record in self.records() for call in record.calls]
        assert len(calls) == now["calls/begun"]
        assert sum(len(call.turn().generated_ids) for call in calls) == now["tokens/generated"] == now["calls/tokens"]


def branches(record: StoredSession) -> list[list[StoredCall]]:
    """The session's calls as conversations, see `conversations`."""
    tokens = [(list(call.prompt_ids), list(call.turn().generated_ids)) for call in record.calls]
    return [[record.calls[place] for place in places] for places in conversations(tokens)]


def conversations(calls: Sequence[tuple[list[int], list[int]]]) -> list[list[int]]:
    """The places of calls, given as prompt and reply ids: each goes with those whose ids it begins with.

    A call that begins with no earlier one's ids starts a conversation of its own: a branch.
    """
    found: list[list[int]] = []
    for place, (prompt, _) in enumerate(calls):
        for conversation in found:
            last_prompt, last_reply = calls[conversation[-1]]
            whole = last_prompt + last_reply
            if prompt[: len(whole)] == whole:
                conversation.append(place)
                break
        else:
            found.append([place])
    return found
