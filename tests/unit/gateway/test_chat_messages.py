"""What is changed of an agent's messages before they are matched and rendered."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.gateway.chat_messages import (
    developer_to_system,
    has_developer,
    has_parts,
    order_tool_results,
    parts_as_text,
    with_joined_texts,
    with_listed_contents,
)
from seamless_verl.gateway.prefix_index import text_only


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def calling(*ids: Any) -> dict[str, Any]:
    calls = [{"id": one, "type": "function", "function": {"name": "f", "arguments": "{}"}} for one in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def result(call_id: Any, text: str = "") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text or f"of {call_id}"}


@pytest.mark.parametrize(
    ("sent", "ordered"),
    [
        ([result("b"), result("a")], [result("a"), result("b")]),
        ([result("x"), result("b"), result("y"), result("a")], [result("a"), result("b"), result("x"), result("y")]),
        ([result(None), result("b")], [result("b"), result(None)]),
    ],
)
def test_results_are_put_into_the_order_of_their_calls(sent: list[Any], ordered: list[Any]) -> None:
    around = [user("q"), calling("a", "b")], [user("more")]
    assert order_tool_results([*around[0], *sent, *around[1]]) == [*around[0], *ordered, *around[1]]


def test_each_run_has_the_order_of_the_calls_before_it() -> None:
    first = [calling("a", "b"), result("b"), result("a")]
    second = [calling("b", "a"), result("a"), result("b")]
    assert order_tool_results([*first, user("more"), *second]) == [
        *(calling("a", "b"), result("a"), result("b")),
        user("more"),
        *(calling("b", "a"), result("b"), result("a")),
    ]


def test_an_assistants_split_message_has_the_calls_of_all_its_parts() -> None:
    head = [calling("a"), calling("b")]
    assert order_tool_results([*head, result("b"), result("a")]) == [*head, result("a"), result("b")]


@pytest.mark.parametrize(
    "messages",
    [
        [calling("a", "b", "a"), result("b"), result("a", "1"), result("a", "2")],
        [calling("a", "b"), result("b", "1"), result("a"), result("b", "2")],
        [calling("a", "b"), result("a"), user("wait"), result("b")],
        [calling("a", "b"), user("wait"), result("b"), result("a")],
        [user("q"), result("b"), result("a")],
        [{"role": "assistant", "content": "yes"}, result("b"), result("a")],
        [{"role": "assistant", "tool_calls": None}, result("b"), result("a")],
        [{"role": "assistant", "tool_calls": ["a", {}, {"id": 3}]}, result(["a"]), result({})],
        [calling("b", "a"), "no message", result("a"), result("b")],
    ],
    ids=["an id of two calls", "two results", "apart", "not behind", "no calls", "text", "none", "malformed", "other"],
)
def test_any_others_stay_as_they_are(messages: list[Any]) -> None:
    assert order_tool_results(messages) == messages


IDS = st.sampled_from(["a", "b", "c", "d", None])
MESSAGES = st.lists(
    st.one_of(
        st.lists(IDS, max_size=4).map(lambda ids: calling(*ids)),
        st.tuples(IDS, st.text(max_size=2)).map(lambda made: result(*made)),
        st.just(user("more")),
    ),
    max_size=16,
)


@given(MESSAGES)
def test_only_places_within_runs_change_and_once(messages: list[Any]) -> None:
    ordered = order_tool_results(messages)
    assert sorted(map(id, ordered)) == sorted(map(id, messages)), "the same messages, each once"
    assert [one["role"] for one in ordered] == [one["role"] for one in messages]
    assert [one for one in ordered if one["role"] != "tool"] == [one for one in messages if one["role"] != "tool"]
    assert [*map(id, order_tool_results(ordered))] == [*map(id, ordered)]


@given(st.lists(st.sampled_from("abcdef"), unique=True), st.randoms())
def test_however_they_were_sent_there_is_one_order(ids: list[str], random: Any) -> None:
    ordered = [calling(*ids), *map(result, ids)]
    shuffled = ordered[1:]
    random.shuffle(shuffled)
    assert order_tool_results([ordered[0], *shuffled]) == ordered == order_tool_results(ordered)


def test_refusals_and_thoughts_among_parts_are_texts() -> None:
    refused = [{"type": "refusal", "refusal": "no", "annotations": []}, {"type": "text", "text": "b"}]
    thought = [{"type": "thinking", "thinking": "hm", "closed": True}]
    messages = [user("q"), {"role": "assistant", "content": refused}, {"role": "assistant", "content": thought}]
    changed = parts_as_text(messages)
    assert not text_only(messages) and text_only(changed) and changed[0] is messages[0]
    assert changed[1]["content"] == [{"type": "text", "text": "no", "annotations": []}, refused[1]]
    assert changed[2]["content"] == [{"type": "text", "text": "hm", "closed": True}]
    assert parts_as_text(changed) == changed and refused[0]["refusal"] == "no"


@pytest.mark.parametrize(
    "part", [{"type": "tool_reference", "name": "f"}, {"type": "refusal"}, {"type": "thinking", "thinking": None}, 3]
)
def test_parts_that_are_no_texts_stay_as_they_are(part: Any) -> None:
    messages = [{"role": "tool", "content": [part]}, {"role": "user", "content": "q"}, "no message"]
    assert [*map(id, parts_as_text(messages))] == [*map(id, messages)]


def test_a_developers_message_becomes_a_system_message_in_its_place() -> None:
    asked = {"role": "developer", "content": [{"type": "text", "text": "be brief"}], "tools": [{"type": "function"}]}
    messages = [{"role": "system", "content": "s"}, asked, user("q"), "no message"]
    assert has_developer(messages)
    changed = developer_to_system(messages)
    assert changed == [messages[0], {"role": "system", "content": asked["content"]}, *messages[2:]]
    assert asked["role"] == "developer" and not has_developer(changed) and developer_to_system(changed) == changed


def test_a_content_that_pydantic_left_as_an_iterator_is_a_list() -> None:
    parts = [{"type": "text", "text": "x"}]
    sent = [{"role": "tool", "content": iter(())}, {"role": "user", "content": iter(parts)}]
    assert with_listed_contents(sent) == [{"role": "tool", "content": []}, {"role": "user", "content": parts}]
    kept = [user("text"), calling("a"), {"role": "user", "content": parts}, {"role": "user"}, "no message"]
    assert all(one is other for one, other in zip(with_listed_contents(kept), kept, strict=True))


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        (["a", {"type": "text", "text": "b", "cache_control": {}}], "a\nb"),
        ([{"type": "text", "text": ""}, {"type": "text", "text": "b"}], "b"),  # vLLM leaves out an empty one
        ([], ""),
    ],
)
def test_texts_are_joined_as_vllm_joins_them(parts: list[Any], text: str) -> None:
    for role in ("user", "system", "tool"):
        sent = [{"role": role, "content": parts, "name": "n"}]
        assert has_parts(sent)
        assert with_joined_texts(sent) == [{"role": role, "content": text, "name": "n"}]


def test_replies_and_what_is_no_text_stay_as_they_are() -> None:
    image = {"type": "image_url", "image_url": {"url": "x"}}
    sent = [
        user("a"),
        {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": [{"type": "text", "text": "a"}, image]},
        {"role": "tool", "content": [{"type": "tool_reference", "text": "a"}]},
        "no message",
    ]
    assert with_joined_texts(sent) == sent
    assert not has_parts([user("a"), calling("a"), "no message"])
