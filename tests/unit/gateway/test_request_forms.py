"""Forms of requests that the real services take: what vLLM is given in their place."""

from __future__ import annotations

import json
from typing import Any

import pytest

from seamless_verl.gateway.request_rules import RequestRules, adapt, is_unread_message, without_empty

RULES = RequestRules()
TEXT = {"type": "output_text", "text": "hi"}
ASKED = {"role": "user", "content": [{"type": "input_text", "text": "q"}]}
FUNCTION = {"type": "function", "name": "add"}
CHAT_FUNCTION = {"type": "function", "function": {"name": "add"}}
SEARCH = {"type": "web_search"}


def changed(body: dict[str, Any], rules: RequestRules = RULES) -> dict[str, Any]:
    """What vLLM gets; the agent's own body stays as it was."""
    before, adapted = json.dumps(body), adapt(body, rules, 50)
    assert json.dumps(body) == before
    return adapted.body


def said(text: str, **more: Any) -> dict[str, Any]:
    """An assistant's message as vLLM reads it."""
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "role": "assistant", "content": [part], **more}


@pytest.mark.parametrize(
    ("item", "read"),
    [
        ({"role": "assistant", "content": [TEXT], "id": "msg_1"}, said("hi", id="msg_1")),
        ({"role": "assistant", "content": [TEXT]}, said("hi")),
        ({"role": "assistant", "content": [TEXT], "type": None}, said("hi")),
        ({"type": "message", "role": "assistant", "content": [TEXT, TEXT]}, said("hihi")),
        ({"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, said("no")),
        ({"type": "message", "role": "assistant", "content": [], "status": "completed"}, said("", status="completed")),
        (ASKED, {**ASKED, "type": "message"}),
    ],
)
def test_messages_are_given_in_the_form_that_vllm_reads(item: dict[str, Any], read: dict[str, Any]) -> None:
    body = {"model": "m", "store": False, "input": [{"role": "user", "content": "q"}, item, ASKED]}
    assert changed(body)["input"] == [body["input"][0], read, {**ASKED, "type": "message"}]
    assert not is_unread_message(read)


@pytest.mark.parametrize(
    "item",
    [
        {"type": "message", "role": "assistant", "content": [TEXT], "id": "msg_1"},
        {"role": "assistant", "content": "hi"},
        {"type": "item_reference", "id": "msg_1"},
        {"id": "msg_1"},
        {"type": "function_call_output", "call_id": "c", "output": [TEXT]},
        {"role": 3, "content": []},
        "hi",
    ],
)
def test_other_items_stay_as_they_are(item: Any) -> None:
    assert changed({"input": [item]}) == {"input": [item]}
    assert changed({"input": "hi"}) == {"input": "hi"}


def test_parts_that_are_no_text_are_for_vllm_to_refuse() -> None:
    item = {"role": "assistant", "content": [TEXT, {"type": "verse"}]}
    assert changed({"input": [item]}) == {"input": [{**item, "type": "message"}]}


def test_messages_with_images_are_typed_too() -> None:
    image = {"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}
    (item,) = changed({"input": [image]})["input"]
    assert item["type"] == "message" and item["content"][0]["type"] == "input_text"


HOSTED = ["web_search_call.action.sources", "file_search_call.results", "computer_call_output.output.image_url"]
OWN = ["message.output_text.logprobs", "reasoning.encrypted_content"]


def test_what_only_hosted_tools_have_is_not_included() -> None:
    body = {"tools": [SEARCH, FUNCTION], "include": [*HOSTED, *OWN]}
    assert changed(body) == {"tools": [FUNCTION], "include": OWN}
    assert changed({"include": ["web_search_call.results"]}) == {"include": []}
    refusing = RequestRules(hosted_tools="refuse")
    assert changed({"include": HOSTED}, refusing) == {"include": HOSTED}, "vLLM says what it takes"
    for other in (None, 3, "all"):
        assert changed({"include": other}) == {"include": other}


def allowing(mode: Any, *tools: Any) -> list[dict[str, Any]]:
    """The choice in the form of responses, and in that of chats."""
    inner = {"mode": mode, "tools": list(tools)}
    return [{"type": "allowed_tools", **inner}, {"type": "allowed_tools", "allowed_tools": inner}]


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("shape", [0, 1])
def test_a_choice_among_some_tools_is_its_mode(mode: str, shape: int) -> None:
    tool = (FUNCTION, CHAT_FUNCTION)[shape]
    choice = allowing(mode, tool)[shape]
    assert changed({"tools": [tool], "tool_choice": choice}) == {"tools": [tool], "tool_choice": mode}
    assert changed({"tools": [tool, SEARCH], "tool_choice": choice}) == {"tools": [tool], "tool_choice": mode}
    gone = allowing(mode, SEARCH)[shape]
    assert changed({"tools": [tool, SEARCH], "tool_choice": gone}) == {"tools": [tool]}, "none that it allows is left"
    assert changed({"tools": [SEARCH], "tool_choice": choice}) == {}


@pytest.mark.parametrize("choice", [*allowing("perhaps"), *allowing(["auto"]), {"type": "allowed_tools"}, "auto"])
def test_other_choices_are_for_vllm_to_read(choice: Any) -> None:
    body = {"tools": [FUNCTION], "tool_choice": choice}
    assert changed(body) == body


@pytest.mark.parametrize("empty", [None, "", [], {}])
def test_an_empty_field_is_the_same_as_none(empty: Any) -> None:
    kept = {"model": empty, "messages": empty, "prompt": empty, "input": empty, "n": 0, "stream": False, "stop": [""]}
    assert without_empty({**kept, "tools": empty, "stop_sequences": empty, "metadata": empty}) == kept


@pytest.mark.parametrize(
    ("choice", "left"),
    [("auto", {}), ("none", {}), ({"type": "auto"}, {}), ("required", {"tool_choice": "required"})],
)
def test_a_choice_among_no_tools_is_left_out(choice: Any, left: dict[str, Any]) -> None:
    assert changed({"tool_choice": choice, "parallel_tool_calls": True}) == left
