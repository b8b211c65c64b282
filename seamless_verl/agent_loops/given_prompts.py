"""Which prompts each agent loop worker was given, for the day that one dies: verl hands them over and forgets them.

Pure. Owned by the agent loop manager, under its lock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from verl.utils import tensordict_utils as tu

from seamless_verl.agent_loops.rows import FIRST

TRAIN, VALIDATION = "train", "val"  # verl's partitions
UNENDED = ("pending", "running")  # verl's marks of a prompt whose group has not ended
PRUNED = 1024  # prompts, before those that have ended are looked for


@dataclass(frozen=True)
class GivenPrompt:
    """The row `place` of a batch that worker `slot` was given; `first` is the number of the first session to run.

    `deaths` is how many workers have died while they had it.
    """

    slot: int
    partition: str
    batch: Any
    place: int
    first: int = 0
    deaths: int = 0


class GivenPrompts:
    """Prompts by uid, from when a worker was given them until somebody says that they have ended.

    Those of `deferred` are to end, and their workers have not said that they did.
    """

    def __init__(self) -> None:
        self.by_uid: dict[str, GivenPrompt] = {}
        self.deferred: dict[str, GivenPrompt] = {}
        self.full = PRUNED

    def add(self, slot: int, batch: Any, deaths: Mapping[str, int] | None = None) -> None:
        """Worker `slot` is given this batch; a prompt that was given before, and is given again, is now this one.

        `deaths` are those of prompts that are begun again.
        """
        partition = VALIDATION if tu.get(batch, "validate", False) else TRAIN
        firsts = column(batch, FIRST) if FIRST in batch else [0] * len(batch)
        for place, (uid, first) in enumerate(zip(column(batch, "uid"), firsts, strict=True)):
            died = (deaths or {}).get(str(uid), 0)
            self.by_uid[str(uid)] = GivenPrompt(slot, partition, batch, place, int(first), died)

    def forget(self, uids: Iterable[str]) -> None:
        """Nobody works on these prompts any more."""
        for uid in uids:
            self.by_uid.pop(uid, None)

    def defer(self, uids: Iterable[str]) -> None:
        """The groups of these prompts are to end."""
        for uid in uids:
            if (given := self.by_uid.pop(uid, None)) is not None:
                self.deferred[uid] = given

    def ended(self, slot: int) -> None:
        """Worker `slot` says that what was deferred there has ended."""
        self.deferred = {uid: given for uid, given in self.deferred.items() if given.slot != slot}

    def prune(self, unended: Collection[str]) -> None:
        """Only these have not ended. The next time is when there are twice as many."""
        self.by_uid = {uid: given for uid, given in self.by_uid.items() if uid in unended}
        self.full = max(PRUNED, 2 * len(self.by_uid))

    def of_worker(self, slot: int, unended: Collection[str]) -> dict[str, GivenPrompt]:
        """The unended prompts of a worker, in the order in which it was given them."""
        return {uid: given for uid, given in self.by_uid.items() if given.slot == slot and uid in unended}


def batches_of(given: Iterable[GivenPrompt]) -> list[Any]:
    """These prompts as batches to give to a worker, each a part of the one that they were given in."""
    places: dict[int, tuple[Any, list[int]]] = {}
    for one in given:
        places.setdefault(id(one.batch), (one.batch, []))[1].append(one.place)
    return [tu.index_select_tensor_dict(batch, chosen) for batch, chosen in places.values()]


def unended_of(tags: Mapping[str, Mapping[str, Any]]) -> frozenset[str]:
    """The uids of prompts whose groups have not ended, by TransferQueue's tags of a partition."""
    return frozenset(uid for uid, tag in tags.items() if tag.get("is_prompt") and tag["status"] in UNENDED)


def rows_of_sessions(keys: Iterable[str], firsts: Mapping[str, int]) -> list[str]:
    """Of the keys `<uid>_<session>_<sequence>`, those of these prompts' sessions from `firsts` on."""
    found = []
    for key in keys:
        uid, session, *_ = [*key.split("_"), ""]
        if uid in firsts and session and int(session) >= firsts[uid]:
            found.append(key)
    return found


def column(batch: Any, name: str) -> list[Any]:
    """A column of a batch as a list."""
    return list(tu.get(batch, name))
