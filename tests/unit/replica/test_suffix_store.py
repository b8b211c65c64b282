"""A store proposes what followed the longest match, of the same prompt first, and stays within its room."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.replica.suffix_store import LEAST, LONGEST, VERSIONS, KeptSample, SuffixStore

PROMPTS = (7, 8)
CONTEXT = {7: [1, 0, 1], 8: [0, 0, 1]}
Written = list[tuple[int, list[int]]]
pieces = st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 2), max_size=12)), max_size=30)


def written(store: SuffixStore, steps: Written) -> dict[int, KeptSample]:
    """Four calls, two of each prompt, whose tokens came in these steps."""
    samples: dict[int, KeptSample] = {}
    for call, tokens in steps:
        prompt = PROMPTS[call % 2]
        if call not in samples:
            samples[call] = store.begin(prompt, CONTEXT[prompt])
        store.extend(prompt, samples[call], tokens)
    return samples


def matched(tokens: list[int], others: list[int], offset: int) -> int:
    lengths = range(min(len(tokens), offset, LONGEST) + 1)
    return max(n for n in lengths if tokens[len(tokens) - n :] == others[offset - n : offset])


def longest(sample: KeptSample, samples: list[KeptSample]) -> int:
    """By looking everywhere: how many tokens match before some token."""
    tokens = sample.tokens.tolist()
    lengths = [matched(tokens, other.tokens.tolist(), at) for other in samples for at in range(len(other.tokens))]
    return max([length for length in lengths if length >= LEAST], default=0)


@given(pieces)
def test_the_longest_match_of_the_prompt_proposes_and_else_another_prompts(steps: Written) -> None:
    store = SuffixStore(10_000)
    samples = written(store, steps)
    for sample in samples.values():
        found = store.propose(sample, 5)
        own = [one for one in samples.values() if one.history is sample.history]
        others = [one for one in samples.values() if one.history is not sample.history]
        best = longest(sample, own)
        assert found.own == bool(best) or not found.tokens
        assert LEAST * bool(best) <= found.matched <= best or not found.own  # TRIES places are looked at
        assert bool(found.tokens) == bool(best or longest(sample, others))
        if found.tokens:
            end = sample.tokens.tolist()[-found.matched :]
            text = [*end, *found.tokens]
            where = own if found.own else others
            assert any(text == one.tokens.tolist()[i : i + len(text)] for one in where for i in range(len(one.tokens)))


def test_the_longest_of_few_places_is_found() -> None:
    store = SuffixStore(1000)
    for tokens in ([5, 6, 7, 8, 9, 100], [4, 6, 7, 8, 9, 200], [0, 0, 7, 8, 9, 300]):
        store.extend(1, store.begin(1, [1, 2, 3]), tokens)
    call = store.begin(1, [1, 2, 3])
    store.extend(1, call, [4, 6, 7, 8, 9])
    assert store.propose(call, 4).tokens == [200] and store.propose(call, 0).tokens == ()


def test_the_first_tokens_are_proposed_from_what_follows_the_prompt() -> None:
    store = SuffixStore(1000)
    store.extend(1, store.begin(1, [1, 2, 3]), [4, 5, 6])
    found = store.propose(store.begin(1, [1, 2, 3]), 2)
    assert (found.tokens, found.matched, found.own) == ([4, 5], LEAST, True)
    other = store.propose(store.begin(2, [1, 2, 3]), 2)
    assert (other.tokens, other.own) == ([4, 5], False)


@given(pieces, st.integers(1, 60))
def test_no_more_than_its_room_is_kept(steps: Written, room: int) -> None:
    store = SuffixStore(room)
    written(store, steps)
    kept = [one for history in store.histories.values() for one in history.samples.values()]
    assert store.size == sum(len(one.tokens) for one in kept) <= max(room, LEAST * 4)
    assert set(store.samples) == {one.number for one in kept}
    entries = [len(history.youngest) for history in store.histories.values()]
    assert sum(entries) <= store.size and len(store.recent) + len(store.older) <= room + 12


def test_a_prompt_that_was_not_used_for_long_is_forgotten_first_and_its_running_call_gets_none() -> None:
    store = SuffixStore(20)
    first = store.begin(1, [1, 2, 3])
    store.extend(1, first, range(10, 15))
    second = store.begin(2, [1, 2, 3])
    store.extend(2, second, range(20, 32))
    assert list(store.histories) == [2]
    store.extend(1, first, [10, 11, 12])
    assert store.size == 14 and store.propose(first, 4).tokens == ()


def test_samples_of_old_versions_are_forgotten() -> None:
    store = SuffixStore(1000)
    store.extend(1, store.begin(1, [1, 2, 3]), [4, 5, 6])
    store.version = VERSIONS
    assert store.propose(store.begin(1, [1, 2, 3]), 2).tokens == [4, 5]
    store.version = VERSIONS + 1
    assert store.propose(store.begin(1, [1, 2, 3]), 2).tokens == () and len(store.samples) == 2
