"""A store of generated tokens by prompt, which proposes what followed the last tokens of a call when they came before.

Looked at first are samples of the same prompt, finished and running, then all others. Laws: at most `room` tokens are
kept, and the prompt that was used the longest ago is forgotten first; what is proposed was generated, in this order,
after the tokens that matched; of places that match as far the youngest is taken.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

LEAST = 2  # tokens that must match
LONGEST = 32  # tokens that are compared
TRIES = 16  # places of one prompt that are compared
VERSIONS = 256  # after which a sample is forgotten
BITS = 20  # of a token's id
KEY_MASK = (1 << BITS * LEAST) - 1
OFFSET_BITS = 32
OFFSET_MASK = (1 << OFFSET_BITS) - 1
NOWHERE = -1


@dataclass(eq=False)
class KeptSample:
    """The tokens of one call behind the end of its prompt, which is there as context.

    A place is the sample's number and an offset in its tokens. `earlier[offset]` is the place before it, in any sample
    of the prompt, that follows the same LEAST tokens; `key` is the last LEAST tokens as one number.
    """

    number: int
    version: int
    history: History
    tokens: array[int] = field(default_factory=lambda: array("i"))
    earlier: array[int] = field(default_factory=lambda: array("q"))
    key: int = 0


@dataclass(eq=False)
class History:
    """The samples of one prompt, by number, and by key the youngest place that follows it."""

    samples: dict[int, KeptSample] = field(default_factory=dict)
    youngest: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Proposal:
    """`tokens` that followed when the last `matched` ones came before; `own` where in a sample of the same prompt."""

    tokens: Sequence[int]
    matched: int
    own: bool


NOTHING = Proposal((), 0, True)


class SuffixStore:
    def __init__(self, room: int) -> None:
        self.room, self.size, self.version = room, 0, 0
        self.histories: OrderedDict[Hashable, History] = OrderedDict()  # in order of use
        self.samples: dict[int, KeptSample] = {}
        self.numbers = 0
        self.recent: dict[int, int] = {}  # of all prompts, the youngest place of a key
        self.older: dict[int, int] = {}  # what `recent` was before it was full

    def begin(self, prompt: Hashable, context: Sequence[int]) -> KeptSample:
        """A new sample of this prompt, of which `context` is the end."""
        history = self.histories.setdefault(prompt, History())
        self.histories.move_to_end(prompt)
        self._forget_old(history)
        self.numbers += 1
        sample = KeptSample(self.numbers, self.version, history)
        self.samples[sample.number] = history.samples[sample.number] = sample
        for token in context[-LEAST:]:
            self._append(sample, token, NOWHERE)
        return sample

    def extend(self, prompt: Hashable, sample: KeptSample, tokens: Iterable[int]) -> None:
        """Adds tokens to a sample of this prompt; nothing where it was forgotten."""
        if sample.number not in self.samples:
            return
        self.histories.move_to_end(prompt)
        youngest, key_length = sample.history.youngest, LEAST
        for token in tokens:
            earlier = NOWHERE
            if len(sample.tokens) >= key_length:
                place = sample.number << OFFSET_BITS | len(sample.tokens)
                earlier = youngest.get(sample.key, NOWHERE)
                youngest[sample.key] = self.recent[sample.key] = place
            self._append(sample, token, earlier)
        if len(self.recent) > self.room // 2:
            self.older, self.recent = self.recent, {}
        while self.size > self.room:
            _, history = self.histories.popitem(last=False)
            self._drop(history.samples.values())

    def propose(self, sample: KeptSample, most: int) -> Proposal:
        """At most `most` tokens that may come next."""
        if len(sample.tokens) < LEAST or most < 1:
            return NOTHING
        places = self._places_of_prompt(sample)
        found, matched = self._longest(sample, places)
        if own := found is None:
            rest = self.recent.get(sample.key, NOWHERE), self.older.get(sample.key, NOWHERE)
            found, matched = self._longest(sample, rest)
        if found is None:
            return NOTHING
        other, offset = found
        return Proposal(other.tokens[offset : offset + most].tolist(), matched, own=not own)

    def _places_of_prompt(self, sample: KeptSample) -> Iterator[int]:
        place = sample.history.youngest.get(sample.key, NOWHERE)
        for _ in range(TRIES):
            yield place
            if (other := self.samples.get(place >> OFFSET_BITS)) is None:
                return
            place = other.earlier[place & OFFSET_MASK]

    def _longest(self, sample: KeptSample, places: Iterable[int]) -> tuple[tuple[KeptSample, int] | None, int]:
        """Of these places the one that the most tokens match, and how many: the first of several."""
        best, matched = None, LEAST - 1
        for place in places:
            if (other := self.samples.get(place >> OFFSET_BITS)) is None:
                continue
            offset = place & OFFSET_MASK
            length = common(sample.tokens, other.tokens, offset)
            if length > matched:
                best, matched = (other, offset), length
                if matched == LONGEST:
                    break
        return best, matched

    def _append(self, sample: KeptSample, token: int, earlier: int) -> None:
        sample.tokens.append(token)
        sample.earlier.append(earlier)
        sample.key = (sample.key << BITS | token) & KEY_MASK
        self.size += 1

    def _forget_old(self, history: History) -> None:
        old = [one for one in history.samples.values() if one.version < self.version - VERSIONS]
        if old:
            for one in old:
                del history.samples[one.number]
            self._drop(old)
            alive = history.samples
            history.youngest = {key: at for key, at in history.youngest.items() if at >> OFFSET_BITS in alive}

    def _drop(self, samples: Iterable[KeptSample]) -> None:
        for one in samples:
            del self.samples[one.number]
            self.size -= len(one.tokens)


def common(tokens: array[int], others: array[int], offset: int) -> int:
    """How many of the last tokens are those before `offset` in the others, LONGEST at most."""
    most = min(LONGEST, len(tokens), offset)
    if tokens[len(tokens) - most :] == others[offset - most : offset]:
        return most
    end = len(tokens)
    length = 0
    while tokens[end - 1 - length] == others[offset - 1 - length]:
        length += 1
    return length
