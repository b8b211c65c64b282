"""System messages within a conversation: Claude Code sends some while it works, Codex a developer's when it resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.gateway import GatewayHarness, assistant, gateway_harness, tokenizer, user

from seamless_verl.gateway.serving import shows_later_system

pytestmark = pytest.mark.integration
FIRST_ONLY = (
    "{% for message in messages %}{% if message.role == 'system' and not loop.first %}WHAT{% endif %}"
    "<|im_start|><|{{ message.role }}|>{{ message.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|><|assistant|>{% endif %}"
)
REFUSING = FIRST_ONLY.replace("WHAT", "{{ raise_exception('the system message comes first') }}")
DROPPING = "{% for message in messages if message.role != 'system' or loop.first %}{{ message.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "shown"),
    [(None, True), (FIRST_ONLY.replace("WHAT", ""), True), (REFUSING, False), (DROPPING, False)],
    ids=["own", "every", "refusing", "dropping"],
)
def test_what_a_template_does_with_a_later_system_message(nano: Path, template: str | None, shown: bool) -> None:
    assert shows_later_system(tokenizer(nano / "model"), template) is shown


async def ask(harness: GatewayHarness, *messages: dict[str, Any]) -> list[int]:
    """The ids of the prompt, and what was generated."""
    asked = {"model": "nano", "max_tokens": 50, "system": "mend", "messages": list(messages)}
    reply = await harness.http.post(f"{harness.session['anthropic_base_url']}/v1/messages", json=asked)
    assert reply.status_code == 200, reply.text
    call = harness.source.calls[-1]
    return [*call.prompt_ids, *harness.recorder.ids(call.call_id)]


async def test_a_later_system_message_leaves_what_was_said_as_it_was(nano: Path) -> None:
    async with gateway_harness(nano) as harness:
        harness.set_replies("yes")
        first = await ask(harness, user("hi"))
        said = (user("hi"), assistant("yes"))
        second = await ask(harness, *said, {"role": "system", "content": "two tools"}, user("go"))
        assert second[: len(first)] == first
        assert harness.prompt().endswith(
            "<|im_start|><|system|>two tools<|im_end|><|im_start|><|user|>go<|im_end|><|im_start|><|assistant|>"
        )
        blocks = [{"type": "text", "text": "two tools"}]
        third = await ask(
            harness, *said, {"role": "system", "content": blocks}, user("go"), assistant("yes"), user("on")
        )
        assert third[: len(second)] == second, "as a list of blocks it is the same message"


async def test_a_template_that_refuses_it_gets_it_in_the_first_message(nano: Path, tmp_path: Path) -> None:
    (tmp_path / "template.jinja").write_text(REFUSING)
    async with gateway_harness(nano, ("--chat-template", str(tmp_path / "template.jinja"))) as harness:
        harness.set_replies("yes")
        await ask(harness, user("hi"), {"role": "system", "content": " two tools"}, user("go"))
        assert harness.prompt().startswith(
            "<|im_start|><|system|>mend two tools<|im_end|><|im_start|><|user|>hi<|im_end|>"
        )


DEVELOPER = {"role": "developer", "content": "two tools"}
OWN_ROLE = FIRST_ONLY.replace("WHAT", "").replace(
    "{{ message.content }}", "{{ 'as a ' if message.role == 'developer' }}{{ message.content }}"
)


async def respond(harness: GatewayHarness, *items: Any) -> list[Any]:
    """The output's items; the ids of prompts and replies are the harness's."""
    reply = await harness.openai.responses.create(model="nano", instructions="mend", input=list(items))
    return [item.model_dump() for item in reply.output]


async def chat(harness: GatewayHarness, *messages: Any) -> list[Any]:
    first: Any = {"role": "system", "content": "mend"}
    reply = await harness.openai.chat.completions.create(model="nano", messages=[first, *messages])
    return [reply.choices[0].message.model_dump(exclude_none=True)]


@pytest.mark.parametrize("send", [respond, chat])
async def test_a_later_developer_message_leaves_what_was_said_as_it_was(nano: Path, send: Any) -> None:
    async with gateway_harness(nano) as harness:
        harness.set_replies("yes")
        brief = {"role": "developer", "content": "be brief"}
        said = [brief, user("hi"), *await send(harness, brief, user("hi"))]
        (call,) = harness.source.calls
        first = [*call.prompt_ids, *harness.recorder.ids(call.call_id)]
        assert harness.prompt().startswith(
            "<|im_start|><|system|>mend<|im_end|><|im_start|><|system|>be brief<|im_end|><|im_start|><|user|>hi"
        )
        await send(harness, *said, DEVELOPER, user("go"))
        assert list(harness.source.calls[-1].prompt_ids)[: len(first)] == first
        assert harness.prompt().endswith(
            "<|im_start|><|system|>two tools<|im_end|><|im_start|><|user|>go<|im_end|><|im_start|><|assistant|>"
        )
        stored = harness.source.calls[-1].request["messages"]
        assert [one["role"] for one in stored] == ["system", "system", "user", "assistant", "system", "user"]


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (REFUSING, "<|im_start|><|system|>mend\n\ntwo tools<|im_end|><|im_start|><|user|>hi<|im_end|>"),
        (OWN_ROLE, "<|im_start|><|user|>hi<|im_end|><|im_start|><|developer|>as a two tools<|im_end|>"),
    ],
    ids=["refusing", "a role of its own"],
)
async def test_other_templates_get_a_developers_message_from_vllm(
    nano: Path, tmp_path: Path, template: str, shown: str
) -> None:
    (tmp_path / "template.jinja").write_text(template)
    async with gateway_harness(nano, ("--chat-template", str(tmp_path / "template.jinja"))) as harness:
        harness.set_replies("yes")
        await chat(harness, user("hi"), DEVELOPER, user("go"))
        assert shown in harness.prompt()
