"""Loops of one worker share what renders their prompts, and get the tokens that verl's own builder renders."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from seamless_verl.agent_loops.prompt_builders import PromptBuilders

pytestmark = pytest.mark.integration
ASKED: list[dict[str, Any]] = [{"role": "system", "content": "add"}, {"role": "user", "content": "1 + 2"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
MADE_OF = {"hf_model_type": "qwen3", "mm_processor_kwargs": {}}


@pytest.fixture(scope="module")
def tokenizer(nano: Path) -> Any:
    return AutoTokenizer.from_pretrained(nano / "model")


def test_loops_share_a_builder_that_is_made_of_the_same(nano: Path, tokenizer: Any) -> None:
    builders = PromptBuilders()
    first = builders(tokenizer, chat_template_kwargs={}, **MADE_OF)
    assert builders(tokenizer, chat_template_kwargs={}, **MADE_OF) is first
    assert builders(tokenizer, chat_template_kwargs={"date": "today"}, **MADE_OF) is not first
    assert builders(AutoTokenizer.from_pretrained(nano / "model"), chat_template_kwargs={}, **MADE_OF) is not first
    assert type(first) is type(create_continuous_token_builder(tokenizer, chat_template_kwargs={}, **MADE_OF))


@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_a_prompt_is_rendered_once_for_all_sessions_and_as_verl_renders_it(tokenizer: Any, tools: Any) -> None:
    verls = create_continuous_token_builder(tokenizer, chat_template_kwargs={}, **MADE_OF)
    ours = PromptBuilders()(tokenizer, chat_template_kwargs={}, **MADE_OF)
    expected = verls.build_initial_tokens(ASKED, tools=tools, images=None, mm_inputs_out={})
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: ours.build_initial_tokens(ASKED, tools=tools, mm_inputs_out={}), range(16)):
            assert found == expected
            found.append(1)  # a loop may change what it got
    other = [*ASKED[:1], {"role": "user", "content": "1 + 3"}]
    assert ours.build_initial_tokens(other, tools=tools) == verls.build_initial_tokens(other, tools=tools)
    assert ours.build_initial_tokens(ASKED, tools=tools) == expected


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
