"""The prefix index: which recorded ids a conversation begins with."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.gateway.prefix_index import PrefixIndex, PrefixMatch, prefix_seed
from seamless_verl.trajectory.records import tokens

SEED = prefix_seed(None, {})


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str | None, *arguments: str) -> dict[str, Any]:
    calls = [{"function": {"name": "f", "arguments": one}} for one in arguments]
    return {"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})


def index_of(*turns: tuple[list[Any], Any, list[int]]) -> PrefixIndex:
    index = PrefixIndex()
    for messages, reply, ids in turns:
        index.add(SEED, messages, reply, tokens(ids[:1]), tokens(ids[1:]))
    return index


@pytest.mark.parametrize(
    ("reply", "sent_back"),
    [
        (assistant("yes"), [assistant("yes")]),
        (assistant("yes "), [assistant("yes")]),  # an API trims
        (assistant("yes"), [assistant([{"type": "text", "text": "yes"}])]),  # type: ignore[arg-type]
        (assistant(None, '{"a":1,"b":2}'), [assistant("", '{"b": 2, "a": 1}')]),
        (
            assistant("", '{"n": 5000.0, "m": 12345678901234567890}'),
            [assistant("", '{"n":5000,"m":12345678901234567000}')],
        ),
        (assistant("so", '{"a":1}'), [assistant("so"), assistant(None, '{"a": 1}')]),  # an API splits
        ({"message": assistant("yes")}, [assistant("yes")]),
    ],
)
def test_a_reply_is_found_however_it_is_sent_back(reply: Any, sent_back: list[Any]) -> None:
    index = index_of(([user("q")], reply, [1, 2, 3]))
    match = index.find_longest(SEED, [user("q"), *sent_back, user("more")])
    assert match is not None and (match.count, list(match.prefix.ids())) == (1 + len(sent_back), [1, 2, 3])


@pytest.mark.parametrize(
    "asked",
    [
        [user("q")],
        [user("q"), assistant("yes")],  # nothing new: the reply itself is being continued
        [user("Q"), assistant("yes"), user("more")],
        [user("q "), assistant("yes"), user("more")],
        [user("q"), assistant("no"), user("more")],
        [user("q"), assistant("yes", "{}"), user("more")],
        [user("q"), assistant("yes"), user([{"type": "image_url", "image_url": {"url": "x"}}])],
    ],
)
def test_any_other_conversation_is_not_found(asked: list[Any]) -> None:
    assert index_of(([user("q")], assistant("yes"), [1, 2])).find_longest(SEED, asked) is None


def test_tools_and_template_settings_are_part_of_it() -> None:
    index = index_of(([user("q")], assistant("yes"), [1, 2]))
    asked = [user("q"), assistant("yes"), user("more")]
    assert index.find_longest(SEED, asked) is not None
    assert index.find_longest(prefix_seed([{"name": "f"}], {}), asked) is None
    assert index.find_longest(prefix_seed(None, {"enable_thinking": True}), asked) is None


@given(st.lists(st.lists(st.integers(0, 9), min_size=2, max_size=5), min_size=1, max_size=8), st.integers(0, 7))
def test_the_longest_beginning_is_found_and_ids_are_kept_once(turns: list[list[int]], back_to: int) -> None:
    index, messages, ids, match = PrefixIndex(), [user("0")], [100], None
    wholes = []
    for number, generated in enumerate(turns):
        index.add(SEED, messages, assistant(f"r{number}"), tokens(ids), tokens(generated), match)
        ids = [*ids, *generated]
        messages = [*messages, assistant(f"r{number}"), user(f"{number + 1}")]
        match = index.find_longest(SEED, messages)
        assert match is not None and (match.count, list(match.prefix.ids())) == (len(messages) - 1, ids)
        wholes.append((messages, ids))
        ids = [*ids, 200 + number]
    kept = sum(len(prefix.tail) for prefix in index._prefixes.values())
    assert kept == len(wholes[-1][1])
    earlier, recorded = wholes[back_to % len(wholes)]
    branch = index.find_longest(SEED, [*earlier[:-1], user("elsewhere")])
    assert branch is not None and list(branch.prefix.ids()) == recorded


def test_a_prompt_that_does_not_begin_with_its_match_is_kept_whole() -> None:
    index = index_of(([user("q")], assistant("yes"), [1, 2]))
    asked = [user("q"), assistant("yes"), user("more")]
    match = index.find_longest(SEED, asked)
    assert isinstance(match, PrefixMatch)
    index.add(SEED, asked, assistant("well"), tokens([9, 9, 9]), tokens([4]), match)
    found = index.find_longest(SEED, [*asked, assistant("well"), user("?")])
    assert found is not None and list(found.prefix.ids()) == [9, 9, 9, 4]


def test_an_index_from_records_finds_the_same() -> None:
    first, tools, template = [user("q")], [{"name": "f"}], {"enable_thinking": False}
    second = [*first, assistant("yes"), user("more")]
    turns = [(first, assistant("yes"), [1, 2], [3, 4]), (second, assistant("well"), [1, 2, 3, 4, 5], [6])]
    index = PrefixIndex()
    for messages, reply, prompt, generated in turns:
        request = {"path": "/v1/chat/completions", "messages": messages, "tools": tools, "template": template}
        kept = json.loads(json.dumps([request, {"message": reply}]))
        index.add_recorded(*kept, tokens(prompt), tokens(generated))
    index.add_recorded({"prompt": "plain"}, {"text": "x"}, tokens([1]), tokens([2]))
    match = index.find_longest(prefix_seed(tools, template), [*second, assistant("well"), user("?")])
    assert match is not None and list(match.prefix.ids()) == [1, 2, 3, 4, 5, 6]
    assert sum(len(prefix.tail) for prefix in index._prefixes.values()) == 6
