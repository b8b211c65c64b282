"""Which calls go first: those of older prompts, and of equal age those that are expected to be the longest.

Training waits for its oldest prompts (staleness), and a step for its longest sample. The age of a prompt is the weight
version that was committed when its group was first seen, so that data planes agree on it without asking each other.

Invariants:
- By its place a call waits for calls of older prompts, of which there is an end, and of its own age. None of a younger
  prompt precedes it.
- A validation that training waits for counts as a version older: not so the prompts that began when it did.
- Of equal age, a call that continues a conversation precedes one that begins one, whatever their lengths.
- Calls of equal age that are expected to be about as long stay in the order in which they came, so that the samples of
  a group stay together: lengths are compared by powers of two, and an unknown one counts as the mean.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from hashlib import blake2b
from itertools import count
from math import log2
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")
# Groups, conversations and prompts, of each; a forgotten one counts as new. Prompts are those of a whole data set: in
# an epoch that has more of them each is forgotten before it comes again.
REMEMBERED = 65_536
DOUBLINGS = 6  # of the mean length, and halvings: what is longer or shorter counts as so long
LEVELS = 2 * DOUBLINGS + 2  # of an engine's priority in one version
RECENT = 8  # calls of a prompt that its mean length follows: lengths change while a model learns


class Precedence(NamedTuple):
    """The place of a call among those that wait; the smallest goes first.

    `version` is the age of its prompt. `begins`: it is the first of its conversation. `shortness` says how often the
    tokens that it is expected to have must double to be the mean, at most `DOUBLINGS` times, 0 unless it begins.
    `ticket` is its conversation's age in this process.
    """

    version: int
    begins: bool
    shortness: int
    ticket: int

    def continuing(self) -> Precedence:
        """The same call after it has begun."""
        return self._replace(begins=False, shortness=0)

    def expecting(self, shortness: int) -> Precedence:
        """The same call with another forecast, if it has not begun."""
        return self._replace(shortness=shortness) if self.begins else self

    @property
    def priority(self) -> int:
        """For vLLM, where the smaller one goes first; without the ticket, for which vLLM has the time of arrival."""
        return self.version * LEVELS + (1 + DOUBLINGS + self.shortness if self.begins else 0)


class Remembered(Generic[T]):
    """The last `limit` keys that were used, with a value each."""

    def __init__(self, limit: int = REMEMBERED) -> None:
        self._limit = limit
        self._values: OrderedDict[str, T] = OrderedDict()  # in order of use

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: str, default: T) -> T:
        return self._values.get(key, default)

    def put(self, key: str, value: T) -> None:
        self._values[key] = value
        self._values.move_to_end(key)
        if len(self._values) > self._limit:
            self._values.popitem(last=False)

    def forget(self, key: str) -> None:
        self._values.pop(key, None)

    def first(self, key: str, value: T) -> T:
        self.put(key, found := self._values.get(key, value))
        return found


def name_of(prompt: bytes) -> str:
    """The name of a prompt by its tokens, int32 [P]: the same in every process."""
    return blake2b(prompt, digest_size=8).hexdigest()


class LengthsByPrompt:
    """How long a call is expected to be, in tokens, from those of the same prompt that have ended, also earlier."""

    def __init__(self) -> None:
        self._means = Remembered[tuple[float, int]]()
        self._mean, self._count = 0.0, 0  # of all prompts

    def add(self, prompt: str, length: int) -> None:
        """A call of this prompt has ended with so many tokens."""
        mean, seen = self._means.get(prompt, (0.0, 0))
        self._means.put(prompt, (mean + (length - mean) / min(seen + 1, RECENT), seen + 1))
        self._count = min(self._count + 1, REMEMBERED)
        self._mean += (length - self._mean) / self._count

    def shortness(self, prompt: str) -> int:
        """How often the expected length of a call of this prompt must double to be the mean of all; 0 if unknown."""
        expected, _ = self._means.get(prompt, (self._mean, 0))
        if not expected or not self._mean:
            return DOUBLINGS if self._mean else 0
        return max(-DOUBLINGS, min(DOUBLINGS, round(log2(self._mean / expected))))


class CallOrder:
    """Gives calls their precedence. Owned state: the ages of groups and conversations, what these began with, and the
    lengths of prompts."""

    def __init__(self) -> None:
        self.lengths = LengthsByPrompt()
        self._tickets = count()
        self._groups = Remembered[int]()
        self._conversations = Remembered[int]()
        self._first_prompts = Remembered[str]()

    def group_began(self, group: str, version: int) -> int:
        """The age of a group, of which this may be the first sign; `version` is the committed one."""
        return self._groups.first(group, version) if group else version

    def conversation_ended(self, key: str) -> None:
        self._conversations.forget(key)
        self._groups.forget(key)  # where it had no group
        self._first_prompts.forget(key)

    def first_prompt(self, key: str) -> str:
        """The name of the prompt that this conversation began with, "" where that is not known."""
        return self._first_prompts.get(key, "")

    def enter(
        self, ids: array[int], *, key: str, group: str, version: int, first: bool = False
    ) -> tuple[Precedence, str]:
        """The place of a call, and the name of its prompt if it begins a conversation, else "".

        `ids` int32 [P] is its prompt, `key` its conversation, "" for a call by itself; `version` is the committed one.
        A conversation without a group has an age of its own. What comes `first` is a version older than it is.
        """
        begins, ticket = not key or key not in self._conversations, next(self._tickets)
        if key:
            ticket = self._conversations.first(key, ticket)
        age = self.group_began(group or key, version) - first
        if not begins:
            return Precedence(age, False, 0, ticket), ""
        prompt = name_of(ids.tobytes())
        if key:
            self._first_prompts.put(key, prompt)
        return Precedence(age, True, self.lengths.shortness(prompt), ticket), prompt
