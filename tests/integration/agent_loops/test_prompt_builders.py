"""Loops of one worker share what renders their prompts, and get the tokens that verl's own builder renders."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from transformers import AutoTokenizer
from verl.utils.tokenizer.continuous_token import ContinuousTokenBuilder
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from seamless_verl.agent_loops.prompt_builders import PromptBuilders

pytestmark = pytest.mark.integration
ASKED: list[dict[str, Any]] = [{"role": "system", "content": "add"}, {"role": "user", "content": "1 + 2"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
MADE_OF = {"hf_model_type": "qwen3", "mm_processor_kwargs": {}}


@pytest.fixture(scope="module")
def tokenizer(nano: Path) -> Any:
    return AutoTokenizer.from_pretrained(nano / "model")


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often builders were made, and prompts rendered."""
    counts = Counter[str]()

    def counting(name: str, method: Any) -> Any:
        @wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            if name == "rendered":
                time.sleep(0.05)  # so long that the threads of a group meet
            return method(*args, **kwargs)

        return run

    for name, method in (("made", "__init__"), ("rendered", "_render_tokens")):
        monkeypatch.setattr(ContinuousTokenBuilder, method, counting(name, getattr(ContinuousTokenBuilder, method)))
    return counts


def test_a_builder_is_made_once_of_the_same(nano: Path, tokenizer: Any, counted: Counter[str]) -> None:
    builders = PromptBuilders()
    for options in ({}, {}, OmegaConf.create({}), {"date": "today"}, OmegaConf.create({"date": "today"})):
        made = builders(tokenizer, chat_template_kwargs=options, **MADE_OF)
    assert counted["made"] == 2
    builders(AutoTokenizer.from_pretrained(nano / "model"), chat_template_kwargs={}, **MADE_OF)
    assert counted["made"] == 3, "of another tokenizer"
    assert type(made) is type(create_continuous_token_builder(tokenizer, chat_template_kwargs={}, **MADE_OF))
    before = counted["made"]
    for _ in range(2):
        builders(tokenizer, chat_template_kwargs={"now": object()}, **MADE_OF)
    assert counted["made"] == before + 2, "what is no JSON may be something else the next time"


@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_a_prompt_is_rendered_once_for_all_sessions_and_as_verl_renders_it(
    tokenizer: Any, tools: Any, counted: Counter[str]
) -> None:
    verls = create_continuous_token_builder(tokenizer, chat_template_kwargs={}, **MADE_OF)
    expected = verls.build_initial_tokens(ASKED, tools=tools, images=None, mm_inputs_out={})
    builders = PromptBuilders()
    counted.clear()

    def of_a_loop(_: int) -> list[int]:
        builder = builders(tokenizer, chat_template_kwargs={}, **MADE_OF)
        found: list[int] = builder.build_initial_tokens(ASKED, tools=tools, images=None, mm_inputs_out={})
        return found

    builders(tokenizer, chat_template_kwargs={}, **MADE_OF)
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(of_a_loop, range(16)):
            assert found == expected
            found.append(1)  # a loop may change what it got
    assert counted == {"made": 1, "rendered": 1}
    ours = builders(tokenizer, chat_template_kwargs={}, **MADE_OF)
    other = [*ASKED[:1], {"role": "user", "content": "1 + 3"}]
    assert ours.build_initial_tokens(other, tools=tools) == verls.build_initial_tokens(other, tools=tools)
    assert of_a_loop(0) == expected
    no_json = [*ASKED[:1], {"role": "user", "content": "1 + 2", "seen": {(1, 2): "a key that is no text"}}]
    counted.clear()
    assert [ours.build_initial_tokens(no_json, tools=tools) for _ in range(2)] == [expected, expected]
    assert counted["rendered"] == 2


def test_what_ends_a_rendering_is_raised_in_each_session_and_forgotten(
    tokenizer: Any, counted: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = PromptBuilders()(tokenizer, chat_template_kwargs={}, **MADE_OF)
    with monkeypatch.context() as broken, ThreadPoolExecutor(4) as pool:
        broken.setattr(tokenizer, "chat_template", "{{ raise_exception('no such role') }}")
        failed = [pool.submit(builder.build_initial_tokens, ASKED) for _ in range(4)]
        assert all("no such role" in str(one.exception()) for one in failed)
    assert builder.build_initial_tokens(ASKED)


def test_a_loop_may_change_its_builder(tokenizer: Any) -> None:
    builders = PromptBuilders()
    mine, other = [builders(tokenizer, chat_template_kwargs={}, **MADE_OF) for _ in range(2)]
    expected = other.build_initial_tokens(ASKED)
    mine.chat_template_kwargs = {"chat_template": "{{ messages[0].content }}"}
    assert mine.build_initial_tokens(ASKED) != expected
    assert other.build_initial_tokens(ASKED) == expected


def test_a_template_s_options_are_those_of_the_builder(tokenizer: Any) -> None:
    """Two builders of one worker, for data sets with other options, do not get each other's prompts."""
    builders, rendered = PromptBuilders(), set[tuple[int, ...]]()
    for options in (
        {},
        {"chat_template": "{{ messages[-1].content }}"},
        {"chat_template": "{{ messages[0].content }}"},
    ):
        builder = builders(tokenizer, chat_template_kwargs=options, **MADE_OF)
        rendered.add(tuple(builder.build_initial_tokens(ASKED)))
    assert len(rendered) == 3
