"""Turns merge by longest common prefix, and nothing of them is lost in the merging."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.trajectory import SessionModel, segment, session, sessions, turn

from seamless_verl.errors import IntegrityError
from seamless_verl.trajectory.records import Segment, Turn
from seamless_verl.trajectory.tree import Node, PlacedTurn, Tree


def tree_of(*turns: Turn) -> Tree:
    return session(*turns).tree


def shape(node: Node) -> object:
    """Nested lists: (turn id or '', ids, children)."""
    return [(child.turn_id, list(child.ids), shape(child)) for child in node.children]


def joined(parts: list[Segment]) -> list[tuple[int, float, int, str]]:
    return [(i, p, part.version, part.replica) for part in parts for i, p in zip(part.ids, part.logprobs, strict=True)]


def parts_of(placed: PlacedTurn) -> list[Segment]:
    return [node.segment for node in placed.generated_nodes() if node.segment is not None]


def test_a_replayed_conversation_stays_one_path() -> None:
    tree = tree_of(turn("a", [1, 2], [3, 4]), turn("b", [1, 2, 3, 4, 5], [6]))
    assert shape(tree.root) == [("", [1, 2], [("a", [3, 4], [("", [5], [("b", [6], [])])])])]


def test_equal_samples_of_one_prompt_are_kept_apart() -> None:
    tree = tree_of(turn("a", [1], [2, 3]), turn("b", [1], [segment([2, 3], first_logprob=-9)]))
    assert shape(tree.root) == [("", [1], [("a", [2, 3], []), ("b", [2, 3], [])])]
    assert [part.logprobs[0] for name in "ab" for part in parts_of(tree.turns[name])] == [-0.5, -9]


def test_of_equal_samples_the_latest_is_continued() -> None:
    tree = tree_of(turn("a", [1], [2, 3]), turn("b", [1], [2, 3]), turn("c", [1, 2, 3, 4], [5]))
    assert tree.turns["c"].match_end is tree.turns["b"].end


def test_a_split_does_not_make_a_sample_the_latest() -> None:
    samples = turn("a", [1], [2, 3, 4]), turn("b", [1], [2, 9])
    tree = tree_of(*samples, turn("c", [1, 2, 3, 7], [5]), turn("d", [1, 2, 5], [6]))
    assert tree.turns["d"].match_end.turn_id == "b" and list(tree.turns["d"].match_end.ids) == [2]


def test_a_generated_path_goes_before_equal_context() -> None:
    tree = tree_of(turn("x", [1, 2, 3]), turn("a", [1], [2, 3]), turn("b", [1, 2, 3, 4]))
    assert tree.turns["b"].match_end is tree.turns["a"].end


def test_a_departure_within_a_generated_run_splits_it_with_its_logprobs() -> None:
    tree = tree_of(turn("a", [1], [segment([2, 3, 4], 7)]), turn("b", [1, 2, 9], [5]))
    assert shape(tree.root) == [("", [1], [("a", [2], [("a", [3, 4], []), ("", [9], [("b", [5], [])])])])]
    assert joined(parts_of(tree.turns["a"])) == joined([segment([2, 3, 4], 7)])


def test_ids_that_agree_in_some_bytes_only_are_different() -> None:
    tree = tree_of(turn("a", [1, 0x01020304], [5]), turn("b", [1, 0x02020304], [5]))
    assert tree.turns["b"].match_end is tree.root.children[0] and list(tree.root.children[0].ids) == [1]


def test_text_of_requests_is_held_once() -> None:
    first = [{"role": "user", "content": "long text"}]
    again = [{"role": "user", "content": "long text"}, {"role": "user", "content": "more"}]
    tree = tree_of(turn("a", [1], [2], messages=first), turn("b", [1, 2, 3], [4], messages=again))
    assert tree.turns["b"].request["messages"][0] is first[0]
    assert tree.turns["b"].request["messages"] == again


def test_a_lost_token_is_named() -> None:
    tree = tree_of(turn("a", [1], [2, 3]))
    tree.root.children[0].children.clear()
    with pytest.raises(IntegrityError, match="turn a: 2 against 0, a difference of -2"):
        tree.check_integrity()


@settings(max_examples=300, deadline=None)
@given(sessions())
def test_every_turn_can_be_read_off_the_tree_as_it_was(model: SessionModel) -> None:
    tree = model.record().tree
    for recorded in model.turns:
        placed = tree.turns[recorded.turn_id]
        assert placed.prompt_ids() == recorded.prompt_ids and placed.generated_ids() == recorded.generated_ids
        assert joined(parts_of(placed)) == joined(list(recorded.segments))


@settings(max_examples=300, deadline=None)
@given(sessions())
def test_the_tree_is_as_small_as_it_can_be(model: SessionModel) -> None:
    tree = model.record().tree
    for node in [tree.root, *tree.nodes()]:
        context = [child.ids[0] for child in node.children if child.segment is None]
        assert len(context) == len(set(context))
        assert all(len(child) for child in node.children)


@settings(max_examples=200, deadline=None)
@given(sessions(), st.data())
def test_a_prompt_is_matched_as_deep_as_any_path_agrees(model: SessionModel, data: st.DataObject) -> None:
    tree = model.record().tree
    prompt = data.draw(st.sampled_from(model.turns)).prompt_ids + data.draw(st.sampled_from(model.turns)).generated_ids
    paths = [[*recorded.prompt_ids, *recorded.generated_ids] for recorded in model.turns]
    agreed = [next((i for i, (a, b) in enumerate(zip(p, prompt, strict=False)) if a != b), None) for p in paths]
    deepest = max(min(len(p), len(prompt)) if at is None else at for p, at in zip(paths, agreed, strict=True))
    assert tree.match(prompt)[2] == deepest
