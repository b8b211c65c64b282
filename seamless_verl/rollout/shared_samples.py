"""Calls that ended, for the engines that run others of the same first prompts and did not generate them.

Law: an engine's process is given each sample once at most, and none that it generated itself; at most `room` tokens are
kept.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

ROOM = 1 << 22  # tokens
CONTEXT = 4  # tokens at a prompt's end that go with a sample


@dataclass(frozen=True, slots=True)
class SharedSample:
    """`ids` int32 were generated after `context`, in a conversation that began with the prompt of this name."""

    prompt: str
    context: array[int]
    ids: array[int]


def parts_of(samples: Iterable[SharedSample], room: int) -> Iterator[list[SharedSample]]:
    """The samples in parts that end with the sample by which they have more tokens than `room`; one part at least."""
    part: list[SharedSample] = []
    size = 0
    for sample in samples:
        part.append(sample)
        size += len(sample.ids)
        if size > room:
            yield part
            part, size = [], 0
    yield part


class SharedSamples:
    def __init__(self, room: int = ROOM) -> None:
        self._room, self._size = room, 0
        self._of_prompt: OrderedDict[str, list[tuple[SharedSample, set[str]]]] = OrderedDict()  # in order of use

    def add(self, prompt: str, prompt_ids: array[int], ids: array[int], replicas: Iterable[str]) -> None:
        """A call has ended, of a conversation that began with `prompt`; `replicas` have its tokens."""
        sample = SharedSample(prompt, prompt_ids[-CONTEXT:], ids)
        self._of_prompt.setdefault(prompt, []).append((sample, set(replicas)))
        self._of_prompt.move_to_end(prompt)
        self._size += len(ids)
        while self._size > self._room:
            _, forgotten = self._of_prompt.popitem(last=False)
            self._size -= sum(len(one.ids) for one, _ in forgotten)

    def forget_replica(self, replica: str) -> None:
        """Another process has this name now, and no sample."""
        for samples in self._of_prompt.values():
            for _, replicas in samples:
                replicas.discard(replica)

    def take(self, replica: str, prompts: Collection[str]) -> list[SharedSample]:
        """Those of these prompts that this replica has not; it has them from now on."""
        taken = []
        for prompt in prompts:
            for sample, replicas in self._of_prompt.get(prompt, ()):
                if replica not in replicas:
                    replicas.add(replica)
                    taken.append(sample)
        return taken
