"""A waiter that needs several groups is called once they have finished, and soon after the first of them."""

from __future__ import annotations

import asyncio

import pytest

from seamless_verl.data_plane import group_notifier
from seamless_verl.data_plane.group_notifier import GroupEnd, GroupNotifier
from seamless_verl.errors import GroupsFailedError

LONG_S = 60.0


async def turns() -> None:
    """Lets the waiter run until it has nothing more to do."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_waiter_returns_when_enough_groups_have_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_notifier, "SOON_S", LONG_S)
    notifier = GroupNotifier(5)
    waiter = asyncio.create_task(notifier.wait(0, LONG_S, enough=3))
    for _ in range(2):
        await turns()
        notifier.notify(GroupEnd())
    await turns()
    assert not waiter.done()
    notifier.notify(GroupEnd())
    assert await waiter == 3


async def test_of_several_groups_the_first_is_known_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_notifier, "SOON_S", 0.01)
    notifier = GroupNotifier(5)
    waiter = asyncio.create_task(notifier.wait(0, LONG_S, enough=3))
    await asyncio.sleep(0.05)
    assert not waiter.done(), "nothing has finished"
    notifier.notify(GroupEnd())
    async with asyncio.timeout(LONG_S / 2):
        assert await waiter == 1


async def test_a_group_that_finished_before_the_wait_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_notifier, "SOON_S", 0.01)
    notifier = GroupNotifier(5)
    notifier.notify(GroupEnd())
    async with asyncio.timeout(LONG_S / 2):
        assert await notifier.wait(0, LONG_S, enough=2) == 1
        assert await notifier.wait(0, LONG_S) == 1


@pytest.mark.parametrize("enough", [1, 5])
async def test_whoever_wakes_it_or_was_told_more_before_returns_at_once(enough: int) -> None:
    notifier = GroupNotifier(5)
    async with asyncio.timeout(LONG_S / 2):
        assert await notifier.wait(57, LONG_S, enough) == 0, "the count is of an earlier process"
        waiter = asyncio.create_task(notifier.wait(0, LONG_S, enough))
        await turns()
        notifier.wake()
        assert await waiter == 0


async def test_a_wait_ends_with_its_time() -> None:
    notifier = GroupNotifier(5)
    async with asyncio.timeout(LONG_S / 2):
        assert await notifier.wait(0, 0.01, enough=2) == 0


def test_groups_without_scores_end_a_run_with_what_gave_the_last_one() -> None:
    """A group that is trained begins the count again; a validation, and what is deferred, do not."""
    unscored = GroupEnd("compute_score of reward.py: nan", sessions=2, kinds={"reward": 2})
    failures = GroupNotifier(5)
    for end in (*[unscored] * 4, GroupEnd(), *[unscored] * 3):
        failures.notify(end)
        failures.check()
    for end in (GroupEnd(validation=True), GroupEnd("its step had enough groups", deferred=True), GroupEnd("other")):
        failures.notify(end)
        failures.check()
    failures.notify(unscored)
    with pytest.raises(GroupsFailedError, match=r"5 groups .* The last: compute_score of reward.py: nan"):
        failures.check()
