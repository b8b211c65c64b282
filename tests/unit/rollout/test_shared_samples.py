"""A replica is given each sample of others once, of the prompts that it has calls of."""

from __future__ import annotations

from array import array

from seamless_verl.rollout.shared_samples import CONTEXT, SharedSample, SharedSamples, parts_of

PROMPT = array("i", range(10))


def test_a_replica_gets_what_others_generated_once() -> None:
    shared = SharedSamples()
    shared.add("p", PROMPT, array("i", [1, 2]), {"a"})
    shared.add("p", PROMPT, array("i", [3]), {"b"})
    shared.add("q", PROMPT, array("i", [4]), {"b"})
    (sample,) = shared.take("a", {"p"})
    assert (sample.prompt, sample.context, sample.ids) == ("p", PROMPT[-CONTEXT:], array("i", [3]))
    assert shared.take("a", {"p"}) == [] and [one.ids[0] for one in shared.take("b", {"p", "q"})] == [1]
    assert {one.ids[0] for one in shared.take("c", ["p", "q", "r"])} == {1, 3, 4}


def test_a_replica_that_was_started_again_gets_all_of_them_also_its_own() -> None:
    shared = SharedSamples()
    for token, replicas in ((1, {"a"}), (2, {"b"})):
        shared.add("p", PROMPT, array("i", [token]), replicas)
    assert [one.ids[0] for one in shared.take("a", {"p"})] == [2]
    shared.forget_replica("a")
    assert [one.ids[0] for one in shared.take("a", {"p"})] == [1, 2] and shared.take("a", {"p"}) == []
    assert [one.ids[0] for one in shared.take("b", {"p"})] == [1]


def test_no_more_than_its_room_is_kept_and_the_prompt_that_was_used_last_stays() -> None:
    shared = SharedSamples(room=4)
    shared.add("p", PROMPT, array("i", [1, 2]), {"a"})
    shared.add("q", PROMPT, array("i", [3, 4]), {"a"})
    shared.add("p", PROMPT, array("i", [5]), {"a"})
    assert shared.take("b", {"q"}) == [] and len(shared.take("b", {"p"})) == 2


def test_parts_end_where_they_have_more_than_the_room_and_there_is_always_one() -> None:
    one, two, three = (SharedSample("p", PROMPT, array("i", range(length))) for length in (3, 2, 1))
    assert list(parts_of([one, two, three], 4)) == [[one, two], [three]]
    assert list(parts_of([one, two], 9)) == [[one, two]] and list(parts_of([], 4)) == [[]]
