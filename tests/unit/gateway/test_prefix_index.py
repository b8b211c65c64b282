"""The prefix index: which recorded ids a conversation begins with."""

from __future__ import annotations

import json
from itertools import groupby, product
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


@pytest.mark.parametrize(
    ("before", "reply", "sent_back"),
    [
        ([assistant("A")], "B", [assistant("A"), assistant("B")]),  # agents that speak in turn
        ([assistant("A ")], "B", [assistant("A "), assistant("B")]),
        ([assistant("A"), assistant("B")], "C", [assistant("A"), assistant("B"), assistant("C")]),
        ([assistant("A")], " B", [assistant("A B")]),  # a message that the agent began
        ([assistant("A")], " B ", [assistant("A B")]),
        ([assistant("A"), assistant("B")], "C", [assistant("ABC")]),
        ([], "A B", [assistant("A "), assistant("B")]),  # a reply that was split
    ],
)
def test_a_reply_after_an_assistants_message_is_found(before: list[Any], reply: str, sent_back: list[Any]) -> None:
    index = index_of(([user("q"), *before], assistant(reply), [1, 2, 3]))
    match = index.find_longest(SEED, [user("q"), *sent_back, user("more")])
    assert match is not None and (match.count, list(match.prefix.ids())) == (1 + len(sent_back), [1, 2, 3])
    again = [user("q"), *sent_back, user("more")]
    index.add(SEED, again, assistant("end"), tokens([1, 2, 3, 4]), tokens([5]), match)
    match = index.find_longest(SEED, [*again, assistant("end"), user("?")])
    assert match is not None and list(match.prefix.ids()) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("before", "reply", "sent_back"),
    [
        ([assistant("A")], "B", [assistant("A")]),
        ([assistant("A")], "B", [assistant("B")]),
        ([assistant("A")], "B", [assistant("B"), assistant("A")]),
        ([assistant("A")], "B", [assistant("A"), user("-"), assistant("B")]),
        ([assistant("A")], "B", [assistant("A"), assistant("B"), assistant("C")]),
        ([assistant("A", "{}")], "B", [assistant("A"), assistant("B")]),
        ([assistant("A ")], "B", [assistant("AB")]),  # white space between two texts is what was said
        ([], "AB", [assistant("A "), assistant("B")]),
    ],
)
def test_another_one_is_not_found(before: list[Any], reply: str, sent_back: list[Any]) -> None:
    index = index_of(([user("q"), *before], assistant(reply), [1, 2, 3]))
    assert index.find_longest(SEED, [user("q"), *sent_back, user("more")]) is None


def test_a_conversation_as_it_is_comes_before_one_with_the_same_text() -> None:
    """Each of two turns of one text is continued with its own ids, in whichever order they were."""
    turns = [([user("q")], assistant("AB"), [1, 2]), ([user("q"), assistant("A")], assistant("B"), [3, 4])]
    for order in (turns, turns[::-1]):
        index = index_of(*order)
        whole = index.find_longest(SEED, [user("q"), assistant("AB"), user("more")])
        parts = index.find_longest(SEED, [user("q"), assistant("A"), assistant("B"), user("more")])
        assert whole is not None and list(whole.prefix.ids()) == [1, 2]
        assert parts is not None and list(parts.prefix.ids()) == [3, 4]


@given(st.lists(st.sampled_from(["a", "b", "ab", "u"]), max_size=5), st.sampled_from(["a", "b", "ab"]))
def test_what_is_found_has_the_text_of_what_was_generated(earlier: list[str], reply: str) -> None:
    """Whatever is asked: the messages that a match covers say what the recorded turn's prompt and reply say."""

    def said(messages: list[Any]) -> list[tuple[str, str]]:
        runs = groupby(messages, key=lambda entry: (entry["role"], entry["role"] == "user" and id(entry)))
        return [(role, "".join(str(entry["content"]) for entry in run)) for (role, _), run in runs]

    def conversation(words: list[str]) -> list[Any]:
        return [user("q"), *(user("u") if word == "u" else assistant(word) for word in words)]

    index = index_of((conversation(earlier), assistant(reply), [1, 2]))
    for size in range(4):
        for words in product(["a", "b", "ab", "u"], repeat=size):
            asked = [*conversation(list(words)), user("more")]
            match = index.find_longest(SEED, asked)
            recorded = said([*conversation(earlier), assistant(reply)])
            ends = [n for n in range(1, len(asked)) if asked[n]["role"] == "user"]
            assert (match is not None) == (recorded in [said(asked[:n]) for n in ends])
            assert match is None or said(asked[: match.count]) == recorded


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


@pytest.mark.parametrize(
    ("asked", "count"),
    [
        ([user("q"), assistant("yes, and"), user("more")], 2),
        ([user("q"), assistant(" yes\n"), user("more")], 2),
        ([user("q"), assistant([{"type": "text", "text": "yes"}, {"type": "text", "text": "!"}]), user("more")], 2),  # type: ignore[arg-type]
        ([user("q"), assistant("yes!"), assistant("and"), user("more")], 2),
        ([user("q"), assistant("yes!"), user("more"), assistant("so it is"), user("?")], 4),
        ([user("q"), assistant("yes!")], None),  # nothing follows it
        ([user("q"), assistant("no"), user("more")], None),
        ([user("Q"), assistant("yes!"), user("more")], None),
        ([user("q"), assistant("yes!", "{}"), user("more")], None),
        ([user("q"), assistant("call!"), user("more")], None),
    ],
)
def test_a_reply_with_more_text_behind_it_is_found(asked: list[Any], count: int | None) -> None:
    said = [([user("q")], assistant(text), [1, 2, 3]) for text in ("y", "yes", " ")]
    calling = ([user("q")], assistant("call", "{}"), [1, 4])
    later = ([user("q"), assistant("yes!"), user("more")], assistant("so"), [1, 5])
    index = index_of(*said, calling, later)
    found = index.find_extended(SEED, asked, 0)
    assert (None if found is None else found.count) == count
    if found is not None:
        assert found.reply.text == ("yes" if count == 2 else "so")
        assert index.find_extended(SEED, asked, found.count) is None, "what is covered is not looked through"
