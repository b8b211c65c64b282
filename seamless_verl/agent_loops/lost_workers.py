"""What becomes of the prompts of an agent loop worker that died: another worker takes its place, and begins them again.

| the group of a prompt | what happens |
|---|---|
| of training, was handed over, but not marked as ended | it is marked now |
| was deferred at this moment | its sessions are dropped as `deferred` |
| runs, and `PROMPT_DEATHS` workers have died with it before | it is dropped as failed: its agent may be what kills |
| runs | its rows, if there are any, are cleared; the new worker runs it under the same uid |

| a session of a group that begins again | what happens |
|---|---|
| its agent had ended | the new worker takes it up, as a resumed run does |
| a runner works on it | the runner goes on, and the new worker waits for its result |
| its agent ran in the worker, or below it | it is dropped as `session`, and the agent begins again, with its replies |

A call of verl's own loops, which has no session, is ended with the prompts of the worker.

Called under the manager's lock, so that a prompt has one worker.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import ray
import transfer_queue as tq

from seamless_verl.agent_loops.given_prompts import (
    TRAIN,
    VALIDATION,
    GivenPrompt,
    GivenPrompts,
    batches_of,
    rows_of_sessions,
    unended_of,
)
from seamless_verl.agent_loops.rows import STORED
from seamless_verl.data_plane.group_notifier import GroupEnd
from seamless_verl.trajectory.account import DropReason

logger = logging.getLogger(__name__)
SETTING = "seamless.loop_worker_restarts"
WINDOW_S = 600.0  # in which a worker may be started again so often
PROMPT_DEATHS = 2  # of workers that had the same prompt, before it is given up
FINISHED, FAILED = "finished", "failure"  # verl's marks of a group


class RestartLimit:
    """Whether a worker may be started again: `limit` times within `WINDOW_S` for each; `now` is a clock in seconds."""

    def __init__(self, limit: int, *, now: Callable[[], float] = time.monotonic) -> None:
        self.limit, self._now = limit, now
        self._starts: defaultdict[int, list[float]] = defaultdict(list)

    def take(self, slot: int) -> bool:
        """Counts a start, unless there were too many."""
        recent = [at for at in self._starts[slot] if at > self._now() - WINDOW_S]
        self._starts[slot] = recent
        if len(recent) >= self.limit:
            return False
        recent.append(self._now())
        return True


class LostPrompts:
    """What is done with the prompts of a lost worker; `planes` are the data planes."""

    def __init__(self, given: GivenPrompts, planes: Sequence[Any]) -> None:
        self.given, self.planes = given, planes

    def end(self, slot: int) -> tuple[list[Any], dict[str, int]]:
        """Ends what the worker left; returns the batches to give to the one in its place, and its prompts' deaths."""
        tags = {partition: tags_of(partition) for partition in (TRAIN, VALIDATION)}
        unended = frozenset[str]().union(*(unended_of(found) for found in tags.values()))
        lost = self.given.of_worker(slot, unended)
        complete = self._complete(lost, tags)
        given_up = {uid for uid, one in lost.items() if uid not in complete and one.deaths >= PROMPT_DEATHS}
        deferred = [uid for uid, one in self.given.deferred.items() if one.slot == slot]
        unwanted = dict.fromkeys(deferred, DropReason.DEFERRED) | dict.fromkeys(given_up, DropReason.SESSION)
        left = (sorted({*lost, *deferred}), sorted(complete), unwanted)
        ray.get([plane.loops_lost.remote(*left) for plane in self.planes])
        self._clear({uid: one for uid, one in lost.items() if uid not in complete})
        for uid in complete:
            self._mark(uid, lost[uid], None)
        for uid in given_up:
            self._mark(uid, lost[uid], f"{PROMPT_DEATHS + 1} agent loop workers died while they ran it")
        self.given.forget({*complete, *given_up})
        self.given.ended(slot)
        again = {uid: one for uid, one in lost.items() if uid in self.given.by_uid}
        texts = (len(again), len(complete), len(given_up))
        logger.warning("%d prompts of it begin again, %d had been handed over, %d are given up", *texts)
        return batches_of(again.values()), {uid: one.deaths + 1 for uid, one in again.items()}

    def _complete(self, lost: Mapping[str, GivenPrompt], tags: Mapping[str, Mapping[str, Any]]) -> set[str]:
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

    def _clear(self, lost: Mapping[str, GivenPrompt]) -> None:
        """Clears the rows of these prompts' sessions, also those that arrived a moment ago."""
        for partition in (TRAIN, VALIDATION):
            firsts = {uid: one.first for uid, one in lost.items() if one.partition == partition}
            if firsts and (rows := rows_of_sessions(tags_of(partition), firsts)):
                tq.kv_clear(keys=rows, partition_id=partition)

    def _mark(self, uid: str, given: GivenPrompt, error: str | None) -> None:
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
