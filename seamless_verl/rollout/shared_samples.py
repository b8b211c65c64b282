"""Samples that ended, for the engines that run other calls of the same prompts and did not generate them.

Law: an engine is given each sample once at most, and none that it generated itself; at most `room` tokens are kept.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass

ROOM = 1 << 22  # tokens
CONTEXT = 4  # tokens at a prompt's end that go with a sample


@dataclass(frozen=True, slots=True)
class SharedSample:
    """`ids` int32 were generated after the prompt of this name, which ends with `context`."""

    prompt: str
    context: array[int]
    ids: array[int]


class SharedSamples:
    def __init__(self, room: int = ROOM) -> None:
        self._room, self._size = room, 0
        self._of_prompt: OrderedDict[str, list[tuple[SharedSample, set[str]]]] = OrderedDict()  # in order of use

    def add(self, prompt: str, prompt_ids: array[int], ids: array[int], replicas: Iterable[str]) -> None:
        """A call of this prompt has ended; `replicas` have its tokens."""
        sample = SharedSample(prompt, prompt_ids[-CONTEXT:], ids)
        self._of_prompt.setdefault(prompt, []).append((sample, set(replicas)))
        self._of_prompt.move_to_end(prompt)
        self._size += len(ids)
        while self._size > self._room:
            _, forgotten = self._of_prompt.popitem(last=False)
            self._size -= sum(len(one.ids) for one, _ in forgotten)

    def take(self, replica: str, prompts: Collection[str]) -> list[SharedSample]:
        """Those of these prompts that this replica has not; it has them from now on."""
        taken = []
        for prompt in prompts:
            for sample, replicas in self._of_prompt.get(prompt, ()):
                if replica not in replicas:
                    replicas.add(replica)
                    taken.append(sample)
        return taken
