"""Which recorded ids a conversation begins with."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.gateway.prefix_index import PrefixIndex, PrefixMatch, seed_of
from seamless_verl.trajectory.records import tokens

SEED = seed_of(None, {})


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str | None, *arguments: str) -> dict[str, Any]:
    calls = [{"function": {"name": "f", "arguments": one}} for one in arguments]
    return {"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})


def remembered(*turns: tuple[list[Any], Any, list[int]]) -> PrefixIndex:
    memory = PrefixIndex()
    for messages, reply, ids in turns:
        memory.add(SEED, messages, reply, tokens(ids[:1]), tokens(ids[1:]))
    return memory


@pytest.mark.parametrize(
    ("reply", "sent_back"),
    [
        (said("yes"), [said("yes")]),
        (said("yes "), [said("yes")]),  # an API trims
        (said("yes"), [said([{"type": "text", "text": "yes"}])]),  # type: ignore[arg-type]
        (said(None, '{"a":1,"b":2}'), [said("", '{"b": 2, "a": 1}')]),
        (said("so", '{"a":1}'), [said("so"), said(None, '{"a": 1}')]),  # an API splits
        ({"message": said("yes")}, [said("yes")]),
    ],
)
def test_a_reply_is_known_however_it_is_sent_back(reply: Any, sent_back: list[Any]) -> None:
    memory = remembered(([user("q")], reply, [1, 2, 3]))
    known = memory.longest(SEED, [user("q"), *sent_back, user("more")])
    assert known is not None and (known.count, list(known.trunk.ids())) == (1 + len(sent_back), [1, 2, 3])


@pytest.mark.parametrize(
    "asked",
    [
        [user("q")],
        [user("q"), said("yes")],  # nothing new: the reply itself is being continued
        [user("Q"), said("yes"), user("more")],
        [user("q "), said("yes"), user("more")],
        [user("q"), said("no"), user("more")],
        [user("q"), said("yes", "{}"), user("more")],
        [user("q"), said("yes"), user([{"type": "image_url", "image_url": {"url": "x"}}])],
    ],
)
def test_anything_else_is_not(asked: list[Any]) -> None:
    assert remembered(([user("q")], said("yes"), [1, 2])).longest(SEED, asked) is None


def test_tools_and_template_settings_are_part_of_it() -> None:
    memory = remembered(([user("q")], said("yes"), [1, 2]))
    asked = [user("q"), said("yes"), user("more")]
    assert memory.longest(SEED, asked) is not None
    assert memory.longest(seed_of([{"name": "f"}], {}), asked) is None
    assert memory.longest(seed_of(None, {"enable_thinking": True}), asked) is None


@given(st.lists(st.lists(st.integers(0, 9), min_size=2, max_size=5), min_size=1, max_size=8), st.integers(0, 7))
def test_the_longest_beginning_is_found_and_ids_are_kept_once(turns: list[list[int]], back_to: int) -> None:
    memory, messages, ids, known = PrefixIndex(), [user("0")], [100], None
    wholes = []
    for number, generated in enumerate(turns):
        memory.add(SEED, messages, said(f"r{number}"), tokens(ids), tokens(generated), known)
        ids = [*ids, *generated]
        messages = [*messages, said(f"r{number}"), user(f"{number + 1}")]
        known = memory.longest(SEED, messages)
        assert known is not None and (known.count, list(known.trunk.ids())) == (len(messages) - 1, ids)
        wholes.append((messages, ids))
        ids = [*ids, 200 + number]
    kept = sum(len(trunk.tail) for trunk in memory._trunks.values())
    assert kept == len(wholes[-1][1])
    earlier, recorded = wholes[back_to % len(wholes)]
    branch = memory.longest(SEED, [*earlier[:-1], user("elsewhere")])
    assert branch is not None and list(branch.trunk.ids()) == recorded


def test_a_prompt_that_does_not_begin_with_its_trunk_stands_alone() -> None:
    memory = remembered(([user("q")], said("yes"), [1, 2]))
    asked = [user("q"), said("yes"), user("more")]
    known = memory.longest(SEED, asked)
    assert isinstance(known, PrefixMatch)
    memory.add(SEED, asked, said("well"), tokens([9, 9, 9]), tokens([4]), known)
    found = memory.longest(SEED, [*asked, said("well"), user("?")])
    assert found is not None and list(found.trunk.ids()) == [9, 9, 9, 4]


def test_a_record_read_again_knows_the_same() -> None:
    first, tools, template = [user("q")], [{"name": "f"}], {"enable_thinking": False}
    second = [*first, said("yes"), user("more")]
    turns = [(first, said("yes"), [1, 2], [3, 4]), (second, said("well"), [1, 2, 3, 4, 5], [6])]
    memory = PrefixIndex()
    for messages, reply, prompt, generated in turns:
        request = {"path": "/v1/chat/completions", "messages": messages, "tools": tools, "template": template}
        kept = json.loads(json.dumps([request, {"message": reply}]))
        memory.recall(*kept, tokens(prompt), tokens(generated))
    memory.recall({"prompt": "plain"}, {"text": "x"}, tokens([1]), tokens([2]))
    known = memory.longest(seed_of(tools, template), [*second, said("well"), user("?")])
    assert known is not None and list(known.trunk.ids()) == [1, 2, 3, 4, 5, 6]
    assert sum(len(trunk.tail) for trunk in memory._trunks.values()) == 6
