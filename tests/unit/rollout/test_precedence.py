"""Which calls go first, and that none waits for ever."""

from __future__ import annotations

import asyncio
from array import array
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from support.rollout import settle

from seamless_verl.rollout.precedence import (
    DOUBLINGS,
    LEVELS,
    RECENT,
    CallOrder,
    LengthsByPrompt,
    Precedence,
    Remembered,
)
from seamless_verl.rollout.replica import Slot
from seamless_verl.rollout.slots import Slots

PLACES = st.builds(
    Precedence,
    version=st.integers(0, 1 << 30),
    begins=st.booleans(),
    shortness=st.integers(-DOUBLINGS, DOUBLINGS),
    ticket=st.integers(0, 9),
).map(lambda place: place if place.begins else place.continuing())


def enter(order: CallOrder, prompt: list[int], **names: str | int) -> Precedence:
    named = {"key": "", "group": "", "version": 0, **names}
    return order.enter(array("i", prompt), **named)[0]  # type: ignore[arg-type]


@given(PLACES, PLACES)
def test_an_older_prompt_precedes_a_younger_one_whatever_their_lengths(one: Precedence, other: Precedence) -> None:
    if one.version < other.version:
        assert one < other and one.priority < other.priority
    if one.priority < other.priority:
        assert one < other, "an engine and the queue have the same order"


@given(PLACES, st.integers(-DOUBLINGS, DOUBLINGS))
def test_a_priority_fits_vllm_s_message_and_its_prompt_s_age(place: Precedence, shortness: int) -> None:
    priority = place.expecting(shortness).priority
    assert place.version * LEVELS <= priority < (place.version + 1) * LEVELS < 1 << 63


def test_of_equal_age_conversations_that_began_precede_and_then_the_longest() -> None:
    began, long, short = (Precedence(3, False, 0, 9), Precedence(3, True, -3, 8), Precedence(3, True, 1, 1))
    assert sorted([short, long, began]) == [began, long, short]
    assert short.expecting(-4) < long and began.expecting(-6) == began and short.continuing() < long


def test_a_group_keeps_the_age_at_which_it_was_first_seen() -> None:
    order = CallOrder()
    order.group_began("g", 4)
    assert enter(order, [1], group="g", version=6).version == 4
    assert enter(order, [1], group="other", version=6).version == 6
    assert enter(order, [1], key="talk", version=6).version == 6
    later = enter(order, [1, 2], key="talk", version=9)
    assert (later.version, later.begins) == (6, False), "of a conversation without a group too"
    assert enter(order, [1], version=9).version == 9


def test_a_validation_precedes_what_began_with_it_and_follows_what_is_older() -> None:
    order = CallOrder()
    trained, validated = (enter(order, [1], key=key, version=6, first=key == "v") for key in ("t", "v"))
    older = enter(order, [1], key="old", version=4)
    assert sorted([trained, older, validated]) == [older, validated, trained]
    assert enter(order, [1, 2], key="v", version=6, first=True).version == 5, "its next call is as old"


def test_a_conversation_keeps_its_ticket() -> None:
    order = CallOrder()
    first, other = enter(order, [1], key="a"), enter(order, [1], key="b")
    again = enter(order, [1, 2], key="a")
    assert first.begins and not again.begins
    assert again.ticket == first.ticket < other.ticket
    assert enter(order, [1]).ticket != enter(order, [1]).ticket


def test_a_conversation_that_has_ended_is_forgotten() -> None:
    """Else a run's memory grows until as many are known as are remembered at most."""
    order = CallOrder()
    for group, age in (("g", 4), ("", 9)):
        enter(order, [1], key="talk", group=group, version=4)
        assert not enter(order, [1], key="talk", group=group, version=9).begins
        for _ in range(2):
            order.conversation_ended("talk")
        again = enter(order, [1], key="talk", group=group, version=9)
        assert (again.begins, again.version) == (True, age), "a group has other conversations"
        order.conversation_ended("talk")


def lengths(**of: list[int]) -> LengthsByPrompt:
    found = LengthsByPrompt()
    for prompt, tokens in of.items():
        for length in tokens:
            found.add(prompt, length)
    return found


def test_a_prompt_s_length_is_compared_with_the_mean_by_powers_of_two() -> None:
    found = lengths(long=[400] * 2, even=[110, 90] * 2, half=[50] * 12, short=[1], empty=[0])  # 90 on the mean
    expected = {"long": -2, "even": 0, "half": 1, "short": DOUBLINGS, "empty": DOUBLINGS, "never seen": 0}
    assert {prompt: found.shortness(prompt) for prompt in expected} == expected


def test_where_nothing_is_known_calls_stay_in_their_order() -> None:
    found = lengths()
    before = found.shortness("a")
    found.add("b", 1000)
    assert before == found.shortness("a") == 0, "also when others become known meanwhile"
    assert lengths(a=[0]).shortness("a") == 0


def test_a_length_follows_what_changes() -> None:
    found = lengths(a=[10] * 50, b=[100] * 50)
    assert found.shortness("a") == 2
    for _ in range(3 * RECENT):
        found.add("a", 100)
    assert found.shortness("a") == found.shortness("b") == -1, "the mean of all is 64"


def test_what_was_used_longest_ago_is_forgotten() -> None:
    ages = Remembered[int](limit=2)
    for key in ("a", "b", "a", "c"):
        ages.first(key, 1)
    assert [key in ages for key in "abc"] == [True, False, True]
    assert ages.first("a", 9) == 1 and ages.get("b", 7) == 7


class OneSlot(Slots):
    """One slot, which is free within `serve`; `served` are the calls in the order in which they got it."""

    def __init__(self, overtaking: int, preferring: set[int]) -> None:
        super().__init__({}, overtaking)
        self.free, self.served, self.tasks = False, list[int](), list[asyncio.Task[Slot]]()
        its_own = lambda view: lambda key: "it" if int(key) in preferring else None  # noqa: E731
        self._policy: Any = SimpleNamespace(preferred=its_own)

    async def enter(self, place: Precedence) -> None:
        number = len(self.tasks)
        self.tasks.append(asyncio.create_task(self.acquire(str(number), place, f"prompt {number % 3}")))
        await settle(2)

    async def serve(self) -> None:
        self.free = True
        self.grant_waiting()
        self.free = False
        await settle(2)

    def _has_slot(self) -> bool:
        return self.free

    def _fits(self, replica_id: str | None) -> bool:
        return self.free and replica_id is not None

    def _grant(self, key: str) -> Any:
        if not self.free:
            return None
        self.free = False
        self.served.append(int(key))
        return object()  # a call that was served does not leave


ARRIVALS = st.lists(
    st.tuples(st.booleans(), st.booleans(), st.integers(-DOUBLINGS, DOUBLINGS), st.sampled_from(["stay", "commit"])),
    min_size=1,
    max_size=40,
)


@given(ARRIVALS, st.sets(st.integers(0, 40)))
def test_no_call_waits_for_ever(arrivals: list[tuple[bool, bool, int, str]], preferring: set[int]) -> None:
    """With a newcomer before each grant, as long as may be: each call is overtaken by few of its age or younger."""
    overtaking = 4

    async def scenario() -> None:
        queue, version, places = OneSlot(overtaking, preferring), 0, list[Precedence]()
        for ticket, (begins, serves, shortness, step) in enumerate(arrivals):
            version += step == "commit"
            place = Precedence(version, begins, shortness if begins else 0, ticket)
            places.append(place)
            await queue.enter(place)
            queue.foresee(f"prompt {ticket % 3}", shortness)
            if serves:
                await queue.serve()
        while len(queue.served) < len(places):
            await queue.serve()
        for position, number in enumerate(queue.served):
            before = queue.served[:position]
            younger = [
                one for one in before if one > number + overtaking and places[one].version >= places[number].version
            ]
            assert not younger, "it was overdue when they came"
        assert queue.waiting == 0

    asyncio.run(scenario())


def test_a_conversation_keeps_the_name_of_the_prompt_that_it_began_with() -> None:
    order = CallOrder()
    (_, first), (_, other) = (order.enter(array("i", [one]), key="a", group="", version=0) for one in (1, 2))
    assert first == order.first_prompt("a") and other == "", "the second call begins nothing"
    order.conversation_ended("a")
    assert order.first_prompt("a") == "" == order.first_prompt("b")
