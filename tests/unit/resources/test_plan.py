"""The placement plan: ranks, replicas, places and verl's fields; every list of groups is planned or refused by name."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.resources import group, plan, resources

from seamless_verl.errors import ConfigError, IntegrityError
from seamless_verl.resources.parallel import ParallelSizes, ReplicaSizes
from seamless_verl.resources.placement import ReplicaKind, RolePlace, Roles
from seamless_verl.resources.plan import Plan, make_plan
from seamless_verl.resources.tags import Layout

BOTH = ("train", "rollout")
NODES, PER_NODE = "nnodes", "n_gpus_per_node"


def fields(made: Plan, node: str) -> tuple[Any, Any]:
    values = dict(made.fields)
    return values.get(f"{node}.{NODES}"), values.get(f"{node}.{PER_NODE}")


def test_a_multiplexed_plan() -> None:
    """The trainer's ranks begin where it generates, and hybrid replicas come before standalone ones."""
    groups = group(1, 4, "train", name="t"), group(2, 4, "rollout", name="r"), group(2, 2, *BOTH, name="b")
    made = plan(*groups, sizes=ParallelSizes(tensor=2), replica=2)
    assert made.layout is Layout.MULTIPLEXED
    assert [device.group for device in made.devices] == ["t"] * 4 + ["r"] * 8 + ["b"] * 4
    assert [device.node for device in made.devices] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 2 + [4] * 2
    assert [device.place for device in made.devices[12:]] == [0, 1, 0, 1]
    assert made.trainer.devices == (12, 13, 14, 15, 0, 1, 2, 3) and made.trainer.data == 4
    kinds = [(replica.rank, replica.kind.value, replica.devices) for replica in made.replicas]
    assert kinds[:3] == [(0, "hybrid", (12, 13)), (1, "hybrid", (14, 15)), (2, "standalone", (4, 5))]
    assert len(kinds) == 6 and made.unused == ()
    assert fields(made, "trainer") == (4, 2) and fields(made, "actor_rollout_ref.rollout") == (2, 4)


def test_a_replica_may_be_several_machines_of_one_group() -> None:
    made = plan(group(4, 4, *BOTH), replica=8, sizes=ParallelSizes(tensor=8))
    assert [replica.per_node for replica in made.replicas] == [4, 4]
    assert made.replicas[1].devices == tuple(range(8, 16))


def test_fields_of_machines_that_are_not_alike_multiply_to_their_devices() -> None:
    made = plan(group(1, 4, "train"), group(1, 6, "train"), group(1, 2, "rollout"), group(1, 6, "rollout"), replica=2)
    assert fields(made, "trainer") == (5, 2)
    assert fields(made, "actor_rollout_ref.rollout") == (4, 2)
    assert fields(plan(group(3, 8, *BOTH)), "actor_rollout_ref.rollout") == (0, 8)


@pytest.mark.parametrize(
    ("groups", "sizes", "replica", "key", "message"),
    [
        ([group(1, 8, *BOTH)], {}, 3, "actor_rollout_ref.rollout.tensor", "of 3 devices does not divide the machines"),
        ([group(1, 4, "train"), group(1, 2, "rollout")], {}, 4, "actor_rollout_ref.rollout.tensor", "more than the 2"),
        ([group(3, 4, *BOTH)], {}, 8, "actor_rollout_ref.rollout.tensor", "not a whole number of machines of group"),
        ([group(1, 6, *BOTH)], {"tensor": 4}, 1, "actor_rollout_ref.actor.megatron.tensor_model", "TP 4 x PP 1"),
        ([group(2, 3, *BOTH)], {"tensor": 2}, 1, "actor_rollout_ref.actor.megatron.tensor_model", "a tensor-parallel"),
        ([group(1, 4, *BOTH)], {"pipeline": 3}, 1, "actor_rollout_ref.actor.megatron.pipeline", "4 devices of group0"),
        ([group(1, 4, *BOTH)], {"context": 8}, 1, "actor_rollout_ref.actor.megatron.context", "multiple of 8"),
        ([group(1, 4, *BOTH)], {"expert": 8}, 1, "actor_rollout_ref.actor.megatron.expert", "expert TP 1 x EP 8"),
    ],
)
def test_sizes_that_do_not_fit(groups: Any, sizes: dict[str, int], replica: int, key: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(*groups, sizes=ParallelSizes(**sizes), replica=replica)
    assert caught.value.key.startswith(key)
    assert message in str(caught.value)


EVERY = Roles(critic=True, reference=True, reward=True, teacher=True)


def test_roles_without_tags_are_with_the_trainer() -> None:
    made = plan(group(1, 4, *BOTH), group(1, 2, "teacher"), roles=EVERY)
    places = {place.tag: place for place in made.places}
    assert all(places[tag].pool == "global_pool" for tag in ("critic", "ref", "reward"))
    assert places["teacher"] == RolePlace("teacher", "teacher_pool", (4, 5))
    assert dict(made.fields)["reward.reward_model.enable_resource_pool"] is False
    assert fields(made, "distillation") == (1, 2)


def test_roles_and_own_tags_on_machines_of_their_own() -> None:
    groups = [group(1, 4, "train"), group(1, 4, "rollout"), group(1, 2, "critic"), group(1, 1, "ref")]
    made = plan(*groups, group(2, 3, "reward"), group(1, 1, "judge"), roles=Roles(True, True, True))
    pools = {place.pool: place.devices for place in made.places}
    assert pools["critic_pool"] == (8, 9) and pools["ref_pool"] == (10,)
    assert pools["reward_pool"] == (11, 12, 13, 14, 15, 16) and pools["judge_pool"] == (17,)
    assert dict(made.fields)["reward.reward_model.enable_resource_pool"] is True
    assert fields(made, "reward.reward_model") == (2, 3)
    assert [device.group for device in plan(*groups).unused] == ["group2", "group2", "group3"]


@pytest.mark.parametrize(
    ("groups", "roles", "message"),
    [
        ([group(1, 4, *BOTH)], Roles(teacher=True), "no machine has the tag teacher, so the teacher"),
        ([group(1, 4, *BOTH, "teacher")], Roles(teacher=True), "group group0 also has train and rollout"),
        ([group(1, 4, "train"), group(1, 4, "rollout")], Roles(reward=True), "no machine has the tag reward"),
        ([group(1, 4, "train"), group(1, 4, "rollout", "reward")], Roles(reward=True), "also has rollout"),
        ([group(1, 4, *BOTH), group(1, 2, *BOTH, "critic")], Roles(critic=True), "critic is for all that train"),
        ([group(1, 4, *BOTH), group(1, 2, "ref")], Roles(reference=True), "Take ref away from group group1"),
        ([group(1, 4, *BOTH), group(1, 2, "critic", "reward")], Roles(True, False, True), "shares devices with"),
        ([group(1, 4, *BOTH), group(1, 2, "reward"), group(1, 1, "reward")], Roles(reward=True), "equally many"),
    ],
)
def test_roles_without_a_place(groups: Any, roles: Roles, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(*groups, roles=roles)
    assert caught.value.key == "seamless.resources"
    assert message in str(caught.value)


def test_a_role_tagged_on_all_that_train_is_with_the_trainer() -> None:
    made = plan(group(1, 4, *BOTH, "critic"), group(1, 2, *BOTH, "critic"), roles=Roles(critic=True))
    assert [place.pool for place in made.places] == ["global_pool"]


TAGS = ["train", "rollout", "critic", "reward", "ref", "teacher", "mine"]
GROUPS = st.lists(
    st.tuples(
        st.integers(1, 3),
        st.integers(1, 4),
        st.sampled_from([BOTH, ("train",), ("rollout",)]) | st.lists(st.sampled_from(TAGS), min_size=1, unique=True),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=150, deadline=None)
@given(
    groups=GROUPS,
    sizes=st.tuples(*[st.sampled_from([1, 1, 1, 2])] * 4),
    replica=st.sampled_from([1, 1, 2, 4]),
    roles=st.builds(Roles, *[st.booleans()] * 3, teacher=st.just(False)),
)
def test_any_groups_are_planned_consistently_or_refused_by_name(
    groups: list[Any], sizes: tuple[int, ...], replica: int, roles: Roles
) -> None:
    try:
        given_groups = resources(*(group(count, devices, *tags) for count, devices, tags in groups))
        made = make_plan(given_groups, ParallelSizes(*sizes), ReplicaSizes(replica), roles)
    except ConfigError as error:
        assert error.key.startswith(("seamless.resources", "actor_rollout_ref.")) and error.way_out
        return
    assert len(made.devices) == sum(count * devices for count, devices, _ in groups)
    assert [device.number for device in made.devices] == list(range(len(made.devices)))
    on_replicas = Counter(number for each in made.replicas for number in each.devices)
    for device in made.devices:
        assert on_replicas[device.number] == int("rollout" in device.tags)
        assert (device.number in made.trainer.devices) == ("train" in device.tags)
    for each in made.replicas:
        assert len({made.devices[number].group for number in each.devices}) == 1
        assert (each.kind is ReplicaKind.HYBRID) == ("train" in made.devices[each.devices[0]].tags)
        machines = Counter(made.devices[number].node for number in each.devices)
        assert set(machines.values()) == {each.per_node} and len(machines) == replica // each.per_node
    for place in made.places:
        own = {number for number in place.devices if place.pool not in ("global_pool", "mine_pool")}
        assert not own & (set(made.trainer.devices) | set(on_replicas))
    nodes, per_node = fields(made, "trainer")
    assert nodes * per_node == len(made.trainer.devices)
    nodes, per_node = fields(made, "actor_rollout_ref.rollout")
    standalone = made.replicas_of(ReplicaKind.STANDALONE)
    assert nodes * per_node == sum(len(each.devices) for each in standalone)


def test_a_plan_that_uses_a_device_twice_is_not_a_plan() -> None:
    made = plan(group(1, 2, *BOTH))
    twice = replace(made, replicas=(made.replicas[0], replace(made.replicas[1], devices=(0,))))
    swapped = replace(made, trainer=replace(made.trainer, devices=(1, 0)))
    for broken in (twice, swapped, replace(made, replicas=made.replicas[:1])):
        with pytest.raises(IntegrityError):
            broken.check_integrity()
