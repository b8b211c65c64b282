"""A group's sessions begin with one prompt, which is rendered once and is the same for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
from support.gateway import TOOL, House, user, visit
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


async def ask(here: House, text: str = "hi", **more: Any) -> list[int]:
    here.say("yes")
    await here.openai.chat.completions.create(model="nano", messages=[user(text)], **more)
    return list(here.source.calls[-1].prompt_ids)


def test_what_is_alike_is_rendered_once(nano: Path, rendered: list[Any]) -> None:
    async def case(here: House) -> None:
        rendered.clear()
        first = await ask(here)
        assert await ask(here, seed=3, temperature=0.5) == first and len(rendered) == 1
        whole = here.tokenizer.apply_chat_template([user("hi")], add_generation_prompt=True, tokenize=True)
        assert first == list(whole["input_ids"] if isinstance(whole, dict) or hasattr(whole, "keys") else whole)

    visit(nano, case)


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
def test_what_differs_is_rendered_by_itself(nano: Path, rendered: list[Any], other: dict[str, Any]) -> None:
    async def case(here: House) -> None:
        await ask(here)
        rendered.clear()
        await ask(here, **other)
        assert len(rendered) == 1

    visit(nano, case)


def test_one_that_leaves_no_room_is_refused_as_the_first_time(nano: Path) -> None:
    async def refused(here: House) -> tuple[int, str]:
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(here, max_tokens=8190)
        return caught.value.status_code, str(caught.value)

    async def case(here: House) -> None:
        before = await refused(here)
        await ask(here)
        assert await refused(here) == before

    visit(nano, case)
