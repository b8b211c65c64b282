"""Three environments of verifiers as a user runs them, for two steps: in one turn, in several, and with a tool."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.paths import RECIPES
from support.recipes import train

from seamless_verl.gateway.token_requests import TOKENS_PATH

pytestmark = [pytest.mark.integration, pytest.mark.long]
STEPS, PROMPTS, SAMPLES = 2, 2, 4
PACKAGES = Path(os.environ.get("VERIFIERS") or RECIPES.parent / "runs" / "verifiers_env" / "verifiers")
FEW = (f"data.train_batch_size={PROMPTS}", f"actor_rollout_ref.rollout.n={SAMPLES}", "data.max_response_length=64")


@pytest.mark.parametrize(
    ("name", "client"), [("sums", "eval"), ("guess", "eval"), ("lookup", "eval"), ("guess", "train")]
)
def test_an_environment_is_trained_as_it_is(name: str, client: str, tmp_path: Path) -> None:
    environment = str(RECIPES / "verifiers_env" / "environments" / f"{name}.toml")
    steps = (f"trainer.total_training_steps={STEPS}", "trainer.test_freq=-1", "trainer.val_before_train=false")
    run = train(
        "verifiers_env",
        tmp_path,
        *FEW,
        *steps,
        "trainer.save_freq=-1",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        ENVIRONMENT=environment,
        CLIENT=client,
        VERIFIERS=str(PACKAGES),
        TASKS="16",
        VAL="2",
        SLOTS="4",
    )
    run.check_counts(STEPS)
    scored = [record for record in run.records() if record.reason == "finished"]
    assert len(scored) >= STEPS * PROMPTS * SAMPLES
    turns = {len(record.calls) for record in scored}
    assert turns == {1} if name == "sums" else max(turns) <= 4
    assert (max(turns) > 1) == (name == "guess"), "the guessing game's user answers until the number is found"
    paths = {call.request["path"] for record in scored for call in record.calls}
    assert paths == ({TOKENS_PATH} if client == "train" else {"/v1/chat/completions"})
    tools = [call.request.get("tools") or [] for record in scored for call in record.calls]
    assert [tool["function"]["name"] for tool in tools[0]] == (["price"] if name == "lookup" else [])
