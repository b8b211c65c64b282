"""Items of stored responses: their ids, also after a restart, and input items that name them."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.responses import ResponseFunctionToolCall

from seamless_verl.gateway.api_errors import ApiError
from seamless_verl.gateway.recovery import restore_response
from seamless_verl.gateway.stored_responses import ItemIds, StoredResponse, StoredResponses
from seamless_verl.trajectory.records import Finish

RESPONSE = {"id": "resp_a1", "model": "m", "instructions": False}
REPLY = {
    "role": "assistant",
    "content": "so",
    "reasoning": "thoughts",
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": f'{{"n":{n}}}'}} for n in (1, 2)],
}


def called(name: str | None) -> ResponseFunctionToolCall:
    return ResponseFunctionToolCall(type="function_call", id=name, call_id="c", name="f", arguments="{}")


def storing(*items: Any) -> StoredResponses:
    responses = StoredResponses()
    for number, item in enumerate(items):
        responses.put(f"resp_{number}", StoredResponse({}, [{"role": "user", "content": "q"}, item]), 64)
    return responses


def reference(name: Any) -> dict[str, Any]:
    return {"type": "item_reference", "id": name}


def test_an_items_id_follows_from_its_response_and_is_given_once() -> None:
    ids = ItemIds("resp_a1")
    begun, ended, other, without = called("x"), called("x"), called("y"), called(None)
    for item in (begun, ended, other, without, begun):
        ids.assign(item)
    assert [begun.id, ended.id, other.id, without.id] == ["fc_a1_0", "fc_a1_0", "fc_a1_1", "fc_a1_2"]
    assert (ids.assigned("x"), ids.assigned("z")) == ("fc_a1_0", "z")


def test_a_restored_output_has_the_ids_that_were_given() -> None:
    asked: list[Any] = [{"role": "user", "content": "q"}, {**REPLY, "content": [{"type": "text", "text": "before"}]}]
    restored = restore_response(RESPONSE, asked, REPLY, Finish.STOP, 0.0)
    wanted = ["rs_a1_0", "msg_a1_0", "fc_a1_0", "fc_a1_1"]
    assert [item["id"] for item in restored.body["output"]] == wanted
    assert [item.id for item in restored.items[-4:]] == wanted
    assert restored.items[-4].content[0].text == "thoughts" and restored.items[-3].content[0].text == "so"
    assert restored.items[2].content[0].text == "before" and not restored.items[2].id


def test_the_items_that_an_input_names_are_found() -> None:
    items = [called(name) for name in "abc"]
    found = storing(*items).referenced({"input": [reference("a"), {"role": "user"}, reference("c"), "?"]})
    assert found == {"a": items[0], "c": items[2]}
    replayed = {"type": "message", "id": "m", "role": "assistant", "content": []}  # as a client sent it
    assert storing(replayed).referenced({"input": [reference("m")]}) == {"m": replayed}


@pytest.mark.parametrize("own", [None, "text", [], [{"role": "user", "id": "a"}], [reference(3)], [reference(None)], 7])
def test_an_input_that_names_no_item_finds_none(own: Any) -> None:
    assert storing(called("a")).referenced({"input": own}) == {}


def test_an_unknown_item_is_refused_as_openai_does() -> None:
    with pytest.raises(ApiError, match=r"^Item with id 'b' not found\.$") as refused:
        storing(called("a")).referenced({"input": [reference("a"), reference("b")]})
    assert (refused.value.status, refused.value.param) == (400, "input")
