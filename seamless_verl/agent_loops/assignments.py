"""Which prompts each agent loop worker was assigned, and what becomes of them when it dies: another begins them again.

Assignments are owned by the agent loop manager; under its lock a lost worker is dealt with, so that a prompt has one
worker. Of a prompt of a worker that died:
- whose group was handed over, but not marked as ended: it is marked now;
- that was deferred at this moment: its sessions are dropped as `deferred`;
- with which `PROMPT_DEATHS` workers had died before: its group is dropped as failed, for its agent may be what kills;
- any other: its rows are cleared, and the new worker runs it under the same uid.

Of the sessions of a group that begins again, one whose agent had ended is taken up, one that a runner works on goes on,
and one whose agent ran in the worker is dropped as `session` and begins again, with its replies. A call of verl's own
loops, which has no session, is ended with the prompts of the worker.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import transfer_queue as tq
from verl.utils import tensordict_utils as tu

from seamless_verl.agent_loops.rows import FIRST, STORED
from seamless_verl.data_plane.group_notifier import GroupEnd
from seamless_verl.trajectory.account import DropReason

logger = logging.getLogger(__name__)
SETTING = "seamless.restarts"
TRAIN, VALIDATION = "train", "val"  # verl's partitions
UNENDED = ("pending", "running")  # verl's marks of a prompt whose group has not ended
FINISHED, FAILED = "finished", "failure"  # verl's marks of a group
PRUNED = 1024  # prompts, before those that have ended are looked for
WINDOW_S = 600.0  # in which a worker may be started again so often
PROMPT_DEATHS = 2  # of workers that had the same prompt, before it is given up


@dataclass(frozen=True)
class AssignedPrompt:
    """The row `place` of a batch that this worker was given; `first` is the number of the first session to run,
    `deaths` how many workers have died while they had it.
    """

    worker: int
    partition: str
    batch: Any
    place: int
    first: int = 0
    deaths: int = 0


class Assignments:
    """Prompts by uid, from when a worker was given them until somebody says that they have ended. Those of
    `deferred` are to end, and their workers have not said that they did.
    """

    def __init__(self) -> None:
        self.by_uid: dict[str, AssignedPrompt] = {}
        self.deferred: dict[str, AssignedPrompt] = {}
        self.full = PRUNED

    def add(self, number: int, batch: Any, deaths: Mapping[str, int] | None = None) -> None:
        """Worker `number` is given this batch, perhaps again; `deaths` are those of prompts begun again."""
        partition = VALIDATION if tu.get(batch, "validate", False) else TRAIN
        firsts = column(batch, FIRST) if FIRST in batch else [0] * len(batch)
        for place, (uid, first) in enumerate(zip(column(batch, "uid"), firsts, strict=True)):
            died = (deaths or {}).get(str(uid), 0)
            self.by_uid[str(uid)] = AssignedPrompt(number, partition, batch, place, int(first), died)

    def forget(self, uids: Iterable[str]) -> None:
        """Nobody works on these prompts any more."""
        for uid in uids:
            self.by_uid.pop(uid, None)

    def defer(self, uids: Iterable[str]) -> None:
        """The groups of these prompts are to end."""
        for uid in uids:
            if (given := self.by_uid.pop(uid, None)) is not None:
                self.deferred[uid] = given

    def ended(self, number: int) -> None:
        """Worker `number` says that what was deferred there has ended."""
        self.deferred = {uid: given for uid, given in self.deferred.items() if given.worker != number}

    def prune(self, unended: Collection[str]) -> None:
        """Only these have not ended. The next time is when there are twice as many."""
        self.by_uid = {uid: given for uid, given in self.by_uid.items() if uid in unended}
        self.full = max(PRUNED, 2 * len(self.by_uid))

    def of_worker(self, number: int, unended: Collection[str]) -> dict[str, AssignedPrompt]:
        """The unended prompts of a worker, in the order in which it was given them."""
        return {uid: given for uid, given in self.by_uid.items() if given.worker == number and uid in unended}


def batches_of(given: Iterable[AssignedPrompt]) -> list[Any]:
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


class RestartLimit:
    """Whether a worker may be started again: `limit` times within `WINDOW_S` for each; `now` is a clock in seconds."""

    def __init__(self, limit: int, *, now: Callable[[], float] = time.monotonic) -> None:
        self.limit, self._now = limit, now
        self._starts: defaultdict[int, list[float]] = defaultdict(list)

    def take(self, number: int) -> bool:
        """Counts a start, unless there were too many."""
        recent = [at for at in self._starts[number] if at > self._now() - WINDOW_S]
        self._starts[number] = recent
        if len(recent) >= self.limit:
            return False
        recent.append(self._now())
        return True


class LostPrompts:
    """What is done with the prompts of a lost worker; `planes` are the data planes."""

    def __init__(self, assignments: Assignments, planes: Sequence[Any]) -> None:
        self.assignments, self.planes = assignments, planes

    def end(self, number: int) -> tuple[list[Any], dict[str, int]]:
        """Ends what the worker left; returns the batches to give to the one in its place, and its prompts' deaths."""
        tags = {partition: tags_of(partition) for partition in (TRAIN, VALIDATION)}
        unended = frozenset[str]().union(*(unended_of(found) for found in tags.values()))
        lost = self.assignments.of_worker(number, unended)
        complete = self._complete(lost, tags)
        given_up = {uid for uid, one in lost.items() if uid not in complete and one.deaths >= PROMPT_DEATHS}
        deferred = [uid for uid, one in self.assignments.deferred.items() if one.worker == number]
        unwanted = dict.fromkeys(deferred, DropReason.DEFERRED) | dict.fromkeys(given_up, DropReason.SESSION)
        left = (sorted({*lost, *deferred}), sorted(complete), unwanted)
        ray.get([plane.loops_lost.remote(*left) for plane in self.planes])
        self._clear({uid: one for uid, one in lost.items() if uid not in complete})
        for uid in complete:
            self._mark(uid, lost[uid], None)
        for uid in given_up:
            self._mark(uid, lost[uid], f"{PROMPT_DEATHS + 1} agent loop workers died while they ran it")
        self.assignments.forget({*complete, *given_up})
        self.assignments.ended(number)
        again = {uid: one for uid, one in lost.items() if uid in self.assignments.by_uid}
        texts = (len(again), len(complete), len(given_up))
        logger.warning("%d prompts of it begin again, %d had been handed over, %d are given up", *texts)
        return batches_of(again.values()), {uid: one.deaths + 1 for uid, one in again.items()}

    def _complete(self, lost: Mapping[str, AssignedPrompt], tags: Mapping[str, Mapping[str, Any]]) -> set[str]:
        """Prompts whose rows are all in TransferQueue: their sessions are acknowledged only then.

        A prompt whose group was reopened has acknowledged sessions from before. Its later rows are put at once, so one
        that is whole stands for all.
        """
        asked = [plane.handed_over.remote(sorted(lost)) for plane in self.planes]
        known = set[str]().union(*ray.get(asked))
        reopened = {uid: one for uid, one in lost.items() if one.first}
        stored = {name: [key for key, tag in of.items() if tag.get("status") == STORED] for name, of in tags.items()}
        put = {uid for uid, one in reopened.items() if rows_of_sessions(stored[one.partition], {uid: one.first})}
        return (known - reopened.keys()) | put

    def _clear(self, lost: Mapping[str, AssignedPrompt]) -> None:
        """Clears the rows of these prompts' sessions, also those that arrived a moment ago."""
        for partition in (TRAIN, VALIDATION):
            firsts = {uid: one.first for uid, one in lost.items() if one.partition == partition}
            if firsts and (rows := rows_of_sessions(tags_of(partition), firsts)):
                tq.kv_clear(keys=rows, partition_id=partition)

    def _mark(self, uid: str, given: AssignedPrompt, error: str | None) -> None:
        """Marks a group as ended, or, with an error, as failed; a reopened one has its earlier sessions in any case."""
        status = FINISHED if error is None or given.first else FAILED
        tq.kv_batch_put(keys=[uid], partition_id=given.partition, tags=[{"status": status}])
        if error is not None:
            logger.warning("prompt %s is given up: %s", uid, error)
        end = GroupEnd(error if status == FAILED else None, validation=given.partition == VALIDATION)
        ray.get(self.planes[0].notify_group_ended.remote(end))


def tags_of(partition: str) -> dict[str, dict[str, Any]]:
    """TransferQueue's tags of a partition, by key."""
    found: dict[str, dict[str, Any]] = (tq.kv_list(partition) or {}).get(partition, {})
    return found


def unended_prompts() -> Collection[str]:
    """The uids of all prompts whose groups have not ended."""
    return unended_of(tags_of(TRAIN)) | unended_of(tags_of(VALIDATION))
