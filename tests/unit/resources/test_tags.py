"""Machine groups: what is read, what layout follows, and what is refused by group, tag, value and way out."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from support.resources import group, resources

from seamless_verl.errors import ConfigError
from seamless_verl.resources.tags import KEY, Layout, Resources, is_one_edit

BOTH = ("train", "rollout")


def refused(node: object) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        Resources.parse(node)
    return caught.value


def test_groups_are_read() -> None:
    found = resources(group(2, 8, *BOTH, name="a100", zone="b"), group(1, 4, "rollout", "mine"))
    first, second = found.groups
    assert (first.name, first.count, first.devices, first.tags) == ("a100", 2, 8, BOTH)
    assert first.labels == (("zone", "b"),) and first.size == 16
    assert (second.name, second.labels) == ("group1", ())
    assert found.size == 20 and found.tags == ("train", "rollout", "mine")
    assert found.tagged("rollout", without="train") == (second,)
    assert pickle.loads(pickle.dumps(found)) == found
    assert Resources.parse(None) is None and Resources.parse([]) is None


@pytest.mark.parametrize(
    ("tags", "layout"),
    [
        ([BOTH], Layout.COLOCATED),
        ([BOTH, BOTH], Layout.COLOCATED),
        ([("train",), ("rollout",)], Layout.DISAGGREGATED),
        ([BOTH, ("rollout",)], Layout.MULTIPLEXED),
        ([BOTH, ("train",)], Layout.MULTIPLEXED),
        ([("train",), BOTH, ("rollout",), ("reward",)], Layout.MULTIPLEXED),
        ([BOTH, ("reward",)], Layout.COLOCATED),
    ],
)
def test_the_layout_follows_from_the_tags(tags: list[tuple[str, ...]], layout: Layout) -> None:
    assert resources(*(group(1, 2, *each) for each in tags)).layout is layout


@pytest.mark.parametrize(
    ("node", "key", "message"),
    [
        ({"count": 1}, KEY, "Write it as seamless.resources=[{count"),
        (["train"], f"{KEY}[0]", "Valid: name, count, devices, tags, labels"),
        ([{"count": 1, "devices": 1, "tag": ["train"]}], f"{KEY}[0].tag", "Did you mean tags?"),
        ([{"devices": 1, "tags": ["train"]}], f"{KEY}[0].count", "Add count"),
        ([group(1, 1)], f"{KEY}[0].tags", "at least one tag"),
        ([group(0, 1, *BOTH)], f"{KEY}[0].count", "Set seamless.resources[0].count=1"),
        ([group(1, 1, *BOTH), group(1, -8, *BOTH)], f"{KEY}[1].devices", "at least 1"),
        ([{**group(1, 1, *BOTH), "count": True}], f"{KEY}[0].count", "whole number"),
        ([group(1, 1, "train", "train", "rollout")], f"{KEY}[0].tags", "names train twice"),
        ([group(1, 1, "train", "roll out")], f"{KEY}[0].tags[1]", "letters, digits"),
        ([group(1, 1, *BOTH, name="a"), group(1, 1, *BOTH, name="a")], f"{KEY}[1].name", "another group"),
        ([group(1, 1, *BOTH), group(1, 1, *BOTH, name="group0")], f"{KEY}[1].name", "another group"),
        ([{**group(1, 1, *BOTH), "labels": {"zone": 3}}], f"{KEY}[0].labels.zone", "must be a text"),
        ([{**group(1, 1, *BOTH), "labels": ["zone"]}], f"{KEY}[0].labels", "node of labels"),
        ([{**group(1, 1, *BOTH), "labels": {"a/b/c": "d"}}], f"{KEY}[0].labels", "not the key of a node label"),
        ([group(1, 1, "rollout")], KEY, "no machine has the tag train, so nothing trains"),
        ([group(1, 1, "train")], KEY, "no machine has the tag rollout, so nothing generates"),
        ([group(1, 1, "train", "rollot")], KEY, "Is rollot a slip for rollout?"),
    ],
)
def test_refused(node: Any, key: str, message: str) -> None:
    error = refused(node)
    assert error.key == key
    assert message in str(error)


def test_a_refusal_names_the_group_its_tags_and_its_labels() -> None:
    error = refused([group(2, 4, "train", name="h100", zone="b")])
    assert error.value == "h100 (2 x 4 devices, tags train, zone=b)"


def test_every_mistake_of_every_group_is_reported() -> None:
    groups = [{"count": 1, "devices": "one", "tags": "train"}, {"cuont": 2, "sort": 1}, {"count": 2}]
    with pytest.raises(ConfigError) as caught:
        Resources.parse(groups)
    keys = ["[0].devices", "[0].tags", "[1].cuont", "[1].sort", "[2].devices", "[2].tags"]
    assert [mistake.key for mistake in caught.value.mistakes] == [f"{KEY}{key}" for key in keys]


@pytest.mark.parametrize("tag", ["trian", "trai", "trains", "traim", "rain", "tarin", "rollot", "roll-out", "Rollout"])
def test_a_slip_is_one_edit(tag: str) -> None:
    assert is_one_edit(tag, "train") or is_one_edit(tag, "rollout")


@pytest.mark.parametrize("tag", ["train", "rollout", "trn", "nia", "a100", "training", "traiin2", "nrait", "rolluot2"])
def test_what_is_more_than_one_edit_away_is_a_tag_of_the_users_own(tag: str) -> None:
    assert not is_one_edit(tag, "train") and not is_one_edit(tag, "rollout")
