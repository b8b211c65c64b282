"""Filters, orders and pages of sessions and groups."""

from __future__ import annotations

from dataclasses import replace

import pytest

from seamless_verl.errors import ConfigError
from seamless_verl.journal import Stage
from seamless_verl.tools.view.index import SessionEntry
from seamless_verl.tools.view.sessions import (
    GROUP_SORTS,
    SORTS,
    Query,
    groups_of,
    list_groups,
    list_sessions,
    reward_of,
)


def entry(name: str, **changes: object) -> SessionEntry:
    one = SessionEntry(
        name, "p", 1.0, False, Stage.HANDED, "finished", "step 3", None, 1, 10, -0.5, (1, 1), ("r0",), {"reward": 1.0}
    )
    return replace(one, **changes)  # type: ignore[arg-type]


ENTRIES = [
    entry("a1", opened_at=1.0, tokens=5, rewards={"reward": 0.5, "bonus": 9.0}),
    entry("a2", opened_at=2.0, tokens=50, mean_logprob=-2.0, versions=(1, 2), replicas=("r0", "r1")),
    entry("b1", opened_at=3.0, uid="q", reason="failed", outcome="dropped", dropped="session", rewards={}),
    entry("b2", opened_at=4.0, uid="q", stage=Stage.OPEN, reason=None, outcome="-", tokens=0, mean_logprob=None,
          versions=None, replicas=(), rewards={}),
    entry("v1", opened_at=5.0, uid="w", validation=True, outcome="validation", dropped="validation", calls=4),
]  # fmt: skip


def found(**query: str) -> list[str]:
    return [one.session_id for one in list_sessions(ENTRIES, Query.of(query, SORTS)).rows]


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ({}, ["v1", "b2", "b1", "a2", "a1"]),
        ({"text": "a"}, ["a2", "a1"]),
        ({"text": "q"}, ["b2", "b1"]),
        ({"stage": "open"}, ["b2"]),
        ({"outcome": "trained"}, ["a2", "a1"]),
        ({"outcome": "step 3"}, ["a2", "a1"]),
        ({"outcome": "dropped"}, ["b1"]),
        ({"reason": "failed"}, ["b1"]),
        ({"dropped": "validation"}, ["v1"]),
        ({"kind": "several_versions"}, ["a2"]),
        ({"kind": "several_replicas"}, ["a2"]),
        ({"kind": "failed"}, ["b1"]),
        ({"kind": "training", "text": "b"}, ["b2", "b1"]),
        ({"kind": "validation"}, ["v1"]),
        ({"sort": "longest"}, ["a2", "b1", "v1", "a1", "b2"]),
        ({"sort": "oldest"}, ["a1", "a2", "b1", "b2", "v1"]),
        ({"sort": "most_calls"}, ["v1", "a1", "a2", "b1", "b2"]),
        ({"sort": "lowest_logprob"}, ["a2", "a1", "b1", "v1", "b2"]),
        ({"sort": "lowest_reward"}, ["a1", "a2", "v1", "b1", "b2"]),
        ({"sort": "highest_reward"}, ["a2", "v1", "a1", "b1", "b2"]),
    ],
)
def test_filters_and_orders(query: dict[str, str], names: list[str]) -> None:
    assert found(**query) == names


def test_a_page_is_a_part_of_what_matches() -> None:
    page = list_sessions(ENTRIES, Query.of({"sort": "oldest", "page": "1", "size": "2", "kind": "training"}, SORTS))
    assert [one.session_id for one in page.rows] == ["b1", "b2"]
    assert (page.total, page.matching, page.page, page.size) == (5, 4, 1, 2)
    assert list_sessions(ENTRIES, Query.of({"page": "99"}, SORTS)).rows == []


def test_counts_are_of_all_sessions_whatever_is_filtered() -> None:
    counts = list_sessions(ENTRIES, Query.of({"text": "a"}, SORTS)).counts
    assert counts["outcome"] == {"trained": 2, "dropped": 1, "-": 1, "validation": 1}
    assert counts["kind"]["failed"] == counts["kind"]["validation"] == counts["dropped"]["session"] == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sort", "best"),
        ("kind", "x"),
        ("page", "-1"),
        ("page", "1.5"),
        ("size", "0"),
        ("size", "501"),
        ("page", "9" * 12),
    ],
)
def test_what_cannot_be_meant_is_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Query.of({name: value}, SORTS)
    assert caught.value.key == name and str(caught.value.value) == value
    if name != "kind":
        with pytest.raises(ConfigError):
            Query.of({name: value}, GROUP_SORTS)


def test_groups_add_up_their_sessions() -> None:
    groups = {one.uid: one for one in groups_of(ENTRIES)}
    assert list(groups) == ["p", "q", "w"]
    trained, failed = groups["p"], groups["q"]
    assert (trained.sessions, trained.failed, trained.tokens, trained.longest) == (2, 0, 55, 50)
    assert (trained.rewards, trained.mean_reward, trained.spread) == ((0.5, 1.0), 0.75, 0.5)
    assert trained.versions == (1, 2) and trained.outcome == "step 3"
    assert (failed.failed, failed.mean_reward, failed.spread) == (1, None, None)


def test_groups_are_filtered_and_ordered() -> None:
    groups = groups_of(ENTRIES)

    def listed(**query: str) -> list[str]:
        return [one.uid for one in list_groups(groups, Query.of(query, GROUP_SORTS)).rows]

    assert listed() == ["w", "q", "p"] and listed(sort="oldest") == ["p", "q", "w"]
    assert listed(outcome="trained") == ["p"] and listed(text="q") == ["q"]
    assert listed(sort="largest_spread")[0] == "p" and listed(sort="failed")[0] == "q"
    assert listed(sort="lowest_reward") == ["p", "w", "q"]


def test_each_order_works_on_sessions_without_anything() -> None:
    for sort in SORTS:
        assert len(found(sort=sort)) == len(ENTRIES)
    for sort in GROUP_SORTS:
        assert list_groups(groups_of(ENTRIES), Query(sort=sort)).matching == 3


def test_the_reward_is_the_one_of_that_name_or_the_only_one() -> None:
    def reward(rewards: dict[str, float]) -> float | None:
        return reward_of(entry("s", rewards=rewards))

    assert reward({"reward": 1.0, "x": 2.0}) == 1.0 and reward({"x": 2.0}) == 2.0
    assert reward({"x": 2.0, "y": 1.0}) is None is reward({})
    assert reward({"pass@1": 0.5}) == 0.5
    assert reward({"reward@s.1": 1.0}) is None, "of a turn"
    assert reward({"reward@s.1": 1.0, "x": 0.5, "reward@s.2": 0.0}) == 0.5
