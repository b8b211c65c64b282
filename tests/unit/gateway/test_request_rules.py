"""What a request may ask for: bounds, hosted tools, output tokens; and the texts of a prompt that is too long."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.errors import ConfigError
from seamless_verl.gateway.api_errors import Api, ApiError, ErrorCode, Overflow, failed_response_events
from seamless_verl.gateway.http import LOOPBACK, METHODS, MODELS_PATH, open_listeners, parse_address, parse_body
from seamless_verl.gateway.http_responses import ModelList
from seamless_verl.gateway.request_rules import RequestRules, adapt, count_calls, is_deeper
from seamless_verl.gateway.stored_responses import StoredResponse, StoredResponses

RULES = RequestRules(max_choices=8, max_nesting=5)
OWN = {"type": "function", "function": {"name": "add"}}
SEARCH, COMPUTER = {"type": "web_search"}, {"type": "computer_20250124", "name": "computer"}
JSON = st.recursive(
    st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
)


def depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth, inner), default=0)


@given(JSON, st.integers(1, 6))
def test_nesting_is_measured(value: Any, limit: int) -> None:
    if isinstance(value, dict | list):
        assert is_deeper(value, limit) == (depth(value) > limit + 1)


@pytest.mark.parametrize(
    ("body", "calls"),
    [
        ({}, 1),
        ({"n": 3}, 3),
        ({"n": "3"}, 3),
        ({"n": 2.0, "prompt": ["a", "b"]}, 4),
        ({"n": None, "prompt": [[1], [2], [3]]}, 3),
        ({"n": -1, "prompt": [1, 2, 3]}, 1),
        ({"n": "many", "prompt": []}, 1),
        ({"n": float("inf")}, 1),
        ({"n": "9" * 5000}, 1),
    ],
)
def test_the_calls_of_a_request_are_counted_as_vllm_reads_them(body: dict[str, Any], calls: int) -> None:
    assert count_calls(body, RULES) == calls


@pytest.mark.parametrize(
    "body", [{"n": 9}, {"n": "9"}, {"n": 10**400}, {"prompt": ["a"] * 9}, {"n": 3, "prompt": ["a"] * 3}]
)
def test_too_many_calls_are_refused(body: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match="at most 8") as refused:
        count_calls(body, RULES)
    assert refused.value.code is ErrorCode.OUT_OF_BOUNDS and len(refused.value.message) < 100


def test_output_tokens_are_clamped_to_the_context() -> None:
    body = {"max_tokens": 10, "max_completion_tokens": 99, "max_output_tokens": "99"}
    assert adapt(body, RULES, 50).body == {**body, "max_completion_tokens": 50}
    assert adapt(body, RULES, 50, {"temperature": 1.0}).body["temperature"] == 1.0


def test_hosted_tools_are_dropped() -> None:
    body = {"tools": [SEARCH, OWN, COMPUTER, {"name": "f"}, 3], "tool_choice": "required", "n": 1}
    adapted = adapt(body, RULES, 50)
    assert adapted.body == {"tools": [OWN, {"name": "f"}, 3], "tool_choice": "required", "n": 1}
    assert adapted.dropped_tools == ("web_search", "computer_20250124")


def test_tools_with_a_free_text_are_dropped_and_anthropics_custom_ones_are_not() -> None:
    own = {"type": "custom", "name": "f", "input_schema": {"type": "object"}}
    free = {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}}
    body = {"tools": [own, free, {"type": "custom", "custom": {"name": "g"}}], "tool_choice": free}
    adapted = adapt(body, RULES, 50)
    assert adapted.body == {"tools": [own]} and adapted.dropped_tools == ("custom", "custom")


@pytest.mark.parametrize(
    ("choice", "kept"),
    [
        ("auto", True),
        ({"type": "web_search"}, False),
        ({"type": "tool", "name": "computer"}, False),
        ({"type": "tool", "name": "add"}, True),
        ({"type": "function", "function": {"name": "add"}}, True),
    ],
)
def test_a_choice_of_a_dropped_tool_is_dropped(choice: Any, kept: bool) -> None:
    body = {"tools": [OWN, SEARCH, COMPUTER], "tool_choice": choice}
    assert ("tool_choice" in adapt(body, RULES, 50).body) is kept
    alone = {"tools": [SEARCH], "tool_choice": choice, "parallel_tool_calls": True}
    assert adapt(alone, RULES, 50).body == {}


def test_a_namespace_with_functions_is_the_agents_where_it_is_taken() -> None:
    group = {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "spawn"}, 3]}
    hosted = {"type": "namespace", "name": "service", "tools": [{"type": "web_search"}]}
    body = {"tools": [group, hosted, SEARCH], "tool_choice": {"type": "function", "name": "spawn"}}
    taken = adapt(body, RULES, 50, namespaces=True)
    assert taken.body == {"tools": [group], "tool_choice": {"type": "function", "name": "spawn"}}
    assert adapt(body, RULES, 50).body == {}


def test_hosted_tools_are_refused_by_a_setting() -> None:
    rules = RequestRules(hosted_tools="refuse")
    with pytest.raises(ApiError, match="web_search") as refused:
        adapt({"tools": [OWN, SEARCH, SEARCH]}, rules, 50)
    assert refused.value.message.count("web_search") == 1
    assert not adapt({"tools": [OWN]}, rules, 50).dropped_tools


@pytest.mark.parametrize("field", ["structured_outputs", "response_format", "tools", "text", "output_config"])
def test_a_deep_schema_is_refused(field: str) -> None:
    schema: Any = {}
    for _ in range(500):
        schema = {"a": schema}
    with pytest.raises(ApiError, match="more than 5 deep"):
        adapt({field: [schema] if field == "tools" else schema}, RULES, 50)


@pytest.mark.parametrize("value", ["no", [1], 3, True])
def test_structured_outputs_are_an_object(value: Any) -> None:
    with pytest.raises(ApiError, match="must be an object"):
        adapt({"structured_outputs": value}, RULES, 50)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"structured_outputs": {"choice": [str(number) for number in range(20_001)]}}, "20000 values"),
        ({"structured_outputs": {"regex": "a" * ((1 << 20) + 1)}}, "1048576 characters"),
        ({"tools": [{"name": "f", "input_schema": {"a" * ((1 << 20) + 1): 1}}]}, "1048576 characters"),
        ({"structured_outputs": {"json": json.dumps([[[[[[1]]]]]])}}, "5 deep"),
        ({"structured_outputs": {"json": "[" * 100_000}}, "nested too deeply"),
        ({"structured_outputs": {"structural_tag": "{"}}, "no JSON"),
    ],
)
def test_a_schema_that_would_take_seconds_to_compile_is_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ApiError, match=named) as caught:
        adapt(fields, RULES, 100)
    assert caught.value.status == 400 and caught.value.param == next(iter(fields))


def test_a_schema_of_a_sane_size_is_taken() -> None:
    fields = {"structured_outputs": {"json": '{"type": "integer"}', "choice": [str(number) for number in range(9000)]}}
    assert adapt(fields, RULES, 100).body == fields


def test_bounds_are_above_zero() -> None:
    with pytest.raises(ConfigError, match="max_choices"):
        RequestRules(max_choices=0)


@pytest.mark.parametrize("body", [b'{"name": "\\ud800"}', b'{"a": [{"\\uDfff": 1}]}'])
def test_half_a_character_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError, match="surrogate"):
        parse_body(body)
    assert parse_body(b'{"a": "\\ud83d\\ude00 \\\\ud800"}') == {"a": "😀 \\ud800"}


def test_a_prompt_that_is_too_long_is_said_as_anthropic_says_it() -> None:
    assert Overflow(300, 256, 9).anthropic_message == "prompt is too long: 300 tokens > 256 maximum"
    fits = Overflow(256, 256, 9).anthropic_message
    assert fits.startswith("input length and `max_tokens` exceed context limit: 256 + 9 > 256, decrease")
    events = failed_response_events("resp_1", "m", 7).decode()
    assert [line for line in events.splitlines() if line.startswith("event: ")][-1] == "event: response.failed"


def test_stored_responses_are_bounded() -> None:
    stored = StoredResponses()
    for name in "abc":
        stored.put(name, StoredResponse({"id": name}, ()), 2)
    assert stored.get("a") is None and len(stored) == 2
    assert stored.handle("DELETE", "c")["deleted"] and stored.get("c") is None and len(stored) == 1
    with pytest.raises(ApiError, match="'c' not found"):
        stored.handle("DELETE", "c")


def test_addresses_of_stored_responses() -> None:
    assert parse_address("/s/key/v1/responses/resp_1").response_id == "resp_1"
    for path in ("/v1/responses", "/v1/responses/", "/v1/responses/a/cancel", "/v1/messages/a"):
        assert parse_address(path).response_id is None
    with pytest.raises(ApiError, match="takes GET or DELETE"):
        parse_address("/v1/responses/a").check("POST")


@pytest.mark.parametrize("path", [*sorted(METHODS), f"{MODELS_PATH}/a/b", "/v1/responses/resp_1", "/v1/messages/other"])
def test_a_path_may_lack_the_version(path: str) -> None:
    short = path.removeprefix("/v1")
    for asked in (path, short, f"{short}/"):
        address, bare = parse_address(f"/s/key{asked}"), parse_address(asked)
        assert (address.path, address.key, bare.path, bare.key) == (path, "key", path, None)
        assert address.api is parse_address(path).api


@pytest.mark.parametrize(
    "path", ["/", "/health", "/admin/sessions", "/runner/lease", "/metrics", "/chats", "/v1/v1/models"]
)
def test_other_paths_stay_as_they_are(path: str) -> None:
    assert parse_address(path).path == path == parse_address(f"/s/key{path}").path


def test_models_in_both_shapes() -> None:
    models = ModelList(["nano", "policy"], 100, 0.0)
    theirs = models.list(Api.ANTHROPIC)
    assert (theirs["first_id"], theirs["last_id"], theirs["has_more"]) == ("nano", "policy", False)
    assert theirs["data"][0]["created_at"] == "1970-01-01T00:00:00Z"
    assert models.describe("any", Api.OPENAI)["object"] == "model"
    with pytest.raises(ApiError, match="`any` does not exist"):
        ModelList(["nano"], 100, 0.0, strict=True).describe("any", Api.OPENAI)


def test_the_gateway_listens_at_the_loopback_address_too() -> None:
    for host, number in (("127.0.0.2", 2), (LOOPBACK, 1)):
        listeners = open_listeners(host)
        try:
            assert len(listeners) == number
            assert {listener.getsockname()[1] for listener in listeners} == {listeners[0].getsockname()[1]}
            assert {listener.getsockname()[0] for listener in listeners} == {host, LOOPBACK}
            with pytest.raises(OSError, match="in use"):
                open_listeners(host, listeners[0].getsockname()[1])
        finally:
            for listener in listeners:
                listener.close()
