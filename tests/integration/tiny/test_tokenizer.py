"""Exact round trips, and a chat template whose renderings grow by appending."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from seamless_verl.tiny.tokenizer import CONTROL_TOKENS, MARKUP_TOKENS, VOCAB_SIZE, make_tokenizer, token_id

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

pytestmark = pytest.mark.integration
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "why": "é"}}}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+2="},
    {"role": "assistant", "content": "", "reasoning_content": "use it", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "3"},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "3"},
    {"role": "user", "content": [{"type": "text", "text": "and "}, {"type": "text", "text": "2+2="}]},
]


@pytest.fixture(scope="module")
def fresh() -> PreTrainedTokenizerBase:
    return make_tokenizer()


@pytest.fixture(scope="module")
def saved(nano: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(nano / "model")


@given(st.text())
@example("<|im_end|> <tool_call>\r\n\x00\u00ad don't .  ")
@example("a\u0301 \U0001f469\u200d\U0001f4bb")
def test_any_text_survives_the_round_trip(fresh: PreTrainedTokenizerBase, text: str) -> None:
    assert fresh.decode(fresh.encode(text)) == text


@given(st.binary(max_size=64))
def test_text_without_markers_costs_one_token_a_byte_numbered_by_it(
    fresh: PreTrainedTokenizerBase, data: bytes
) -> None:
    text = data.decode("utf-8", errors="ignore").replace("<", "")
    assert fresh.encode(text) == list(text.encode("utf-8"))


@given(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=32))
def test_every_id_decodes(fresh: PreTrainedTokenizerBase, ids: list[int]) -> None:
    tokens = fresh.convert_ids_to_tokens(ids)
    assert None not in tokens and len(tokens) == len(ids)
    assert isinstance(fresh.decode(ids), str)


def test_the_saved_tokenizer_is_the_same(fresh: PreTrainedTokenizerBase, saved: PreTrainedTokenizerBase) -> None:
    assert saved.get_vocab() == fresh.get_vocab()
    assert len(saved) == VOCAB_SIZE
    assert saved.chat_template == fresh.chat_template
    text = "héllo\n <|user|> </tool_call> 漢"
    assert saved.encode(text) == fresh.encode(text)


def test_markers_are_single_tokens_and_only_control_tokens_are_skipped(saved: PreTrainedTokenizerBase) -> None:
    for token in (*CONTROL_TOKENS, *MARKUP_TOKENS):
        assert saved.encode(token) == [token_id(token)]
        assert saved.decode([token_id(token)], skip_special_tokens=True) == ("" if token in CONTROL_TOKENS else token)


def test_a_short_question_is_a_short_prompt(saved: PreTrainedTokenizerBase) -> None:
    chat = [{"role": "user", "content": "1+2="}]
    ids = saved.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert len(ids) == 9


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("chat", [CHAT, CHAT[1:]], ids=["system", "no system"])
def test_a_shorter_chat_renders_to_a_prefix(
    fresh: PreTrainedTokenizerBase, chat: list[dict[str, Any]], tools: list[Any] | None
) -> None:
    def render(count: int) -> str:
        return fresh.apply_chat_template(chat[:count], tools=tools, tokenize=False)

    for count in range(1, len(chat)):
        assert render(count + 1).startswith(render(count))


def test_a_generated_turn_continues_its_prompt_id_for_id(fresh: PreTrainedTokenizerBase) -> None:
    prompt = fresh.apply_chat_template(CHAT[:5], tools=TOOLS, add_generation_prompt=True, return_dict=False)
    generated = [*b"3", fresh.eos_token_id]
    assert prompt + generated == fresh.apply_chat_template(CHAT[:6], tools=TOOLS, return_dict=False)


def test_tools_and_tool_calls_are_rendered_as_json_in_their_markers(fresh: PreTrainedTokenizerBase) -> None:
    text = fresh.apply_chat_template(CHAT, tools=TOOLS, tokenize=False)
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "why": "é"}}</tool_call>'
    assert text.count(call) == 2
    assert "<think>use it</think>" in text
    assert text.count("<tool_response>3</tool_response>") == 2
    assert '<tools>[{"type": "function", "function": {"name": "add"' in text
    assert text.count("<|system|>") == 1
    assert text.endswith("<|user|>and 2+2=<|im_end|>")


def test_arguments_given_as_text_are_kept_as_they_are(fresh: PreTrainedTokenizerBase) -> None:
    call = {"function": {"name": "add", "arguments": '{"a":1}'}}
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    text = fresh.apply_chat_template(chat, tokenize=False)
    assert '<|assistant|><tool_call>{"name": "add", "arguments": {"a":1}}</tool_call><|im_end|>' in text


def test_an_unknown_role_is_refused(fresh: PreTrainedTokenizerBase) -> None:
    from jinja2.exceptions import TemplateError

    with pytest.raises(TemplateError, match="not critic"):
        fresh.apply_chat_template([{"role": "critic", "content": "no"}], tokenize=False)
