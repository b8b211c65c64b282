"""A group's sessions begin with one prompt, which is rendered once and is the same for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
from support.gateway import TOOL, GatewayHarness, gateway_harness, user
from vllm.renderers.hf import HfRenderer

pytestmark = pytest.mark.integration


@pytest.fixture
def rendered(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The conversations that vLLM rendered."""
    seen: list[Any] = []
    render = HfRenderer.render_chat_async

    async def noted(self: Any, conversations: Any, *args: Any, **more: Any) -> Any:
        seen.extend(conversations)
        return await render(self, conversations, *args, **more)

    monkeypatch.setattr(HfRenderer, "render_chat_async", noted)
    return seen


async def ask(harness: GatewayHarness, text: str = "hi", **more: Any) -> list[int]:
    harness.set_replies("yes")
    await harness.openai.chat.completions.create(model="nano", messages=[user(text)], **more)
    return list(harness.source.calls[-1].prompt_ids)


async def test_equal_prompts_are_rendered_once(nano: Path, rendered: list[Any]) -> None:
    async with gateway_harness(nano) as harness:
        rendered.clear()
        first = await ask(harness)
        assert await ask(harness, seed=3, temperature=0.5) == first and len(rendered) == 1
        whole = harness.tokenizer.apply_chat_template([user("hi")], add_generation_prompt=True, tokenize=True)
        assert first == list(whole["input_ids"] if isinstance(whole, dict) or hasattr(whole, "keys") else whole)


@pytest.mark.parametrize(
    "other",
    [
        {"text": "ho"},
        {"tools": [TOOL]},
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}},
        {"extra_body": {"chat_template_kwargs": {"tools": [TOOL]}}},
        {"extra_body": {"add_special_tokens": True}},
        {"response_format": {"type": "json_object"}},
        {"extra_body": {"return_prompt_text": True}},
    ],
    ids=str,
)
async def test_a_different_prompt_is_rendered_again(nano: Path, rendered: list[Any], other: dict[str, Any]) -> None:
    async with gateway_harness(nano) as harness:
        await ask(harness)
        rendered.clear()
        await ask(harness, **other)
        assert len(rendered) == 1


async def test_a_cached_prompt_that_is_too_long_is_refused_as_before(nano: Path) -> None:
    async def refused(harness: GatewayHarness) -> tuple[int, str]:
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(harness, text="one and two " * 3000)
        assert caught.value.code == "context_length_exceeded"
        return caught.value.status_code, str(caught.value)

    async with gateway_harness(nano) as harness:
        before = await refused(harness)
        await ask(harness)
        assert await refused(harness) == before
