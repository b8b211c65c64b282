"""verl's replay buffer with a bound on the staleness of the groups that the trainer takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

from seamless_verl.agent_loops.assignments import TRAIN, VALIDATION
from seamless_verl.agent_loops.row_keys import prompt_of
from seamless_verl.journal import GroupDecided, GroupOutcome
from seamless_verl.resources.ahead import StalenessBound
from seamless_verl.runtime.sample_lengths import LengthRecord
from seamless_verl.trainer.prompt_names import DEFERRED, put_aside


class SeamlessReplayBuffer(ReplayBufferAsync):
    """verl's asynchronous buffer under a `StalenessBound`.

    Sampling takes the oldest finished groups. It waits while that would leave a group behind that could then not be
    trained in time. A group that exceeds the bound all the same, as after a resume with a smaller one, is dropped,
    counted, and replaced by a fresh prompt. With `defers` what a step leaves behind is deferred, and not waited for.
    """

    def __init__(
        self,
        *,
        bound: StalenessBound,
        update: Callable[[], int],
        wait: Callable[[], None],
        defers: bool = False,
        lengths: LengthRecord | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs.update(max_off_policy_threshold=bound.max_staleness + 1, max_off_policy_strategy="wait")
        super().__init__(**kwargs)
        self.bound, self.update, self.wait, self.defers = bound, update, wait, defers
        self.lengths = lengths
        self.decided: list[GroupDecided] = []  # of groups dropped since `take_decided`
        self.sampled: dict[str, float] = {}  # when prompts' groups were sampled since then
        self.taken = set[str]()  # prompts of the last batch, whose rows stay until the end of its step
        self.late: tuple[str, ...] = ()  # prompts whose groups held training back at the last look
        self.lacking = 1  # at least so many groups have to end before there is a batch, as of then
        self.trained_from: list[int] = []  # steps in which the groups sampled since `carried_over` were submitted
        self.before_validated: Callable[[int], None] | None = None  # waits for so many groups of a validation
        self.validated: list[int] = []  # newest versions of tokens in samples of a validation; who validates clears it
        self.review: Callable[[], Collection[str]] = tuple  # at each look; reopens groups, and says which
        self.unwanted: Callable[[], Mapping[str, str]] = dict  # finished groups that are to be dropped, and why

    def _sync_metadata_from_transfer_queue(self) -> None:
        super()._sync_metadata_from_transfer_queue()
        for uid in self.review():
            self.finished_keys[TRAIN].discard(uid)
            self.pending_keys[TRAIN].add(uid)
        if self.lengths is not None:
            self.lengths.groups_ended(self.partitions[TRAIN], self.finished_keys[TRAIN])

    def _terminal_eviction_reasons(self, global_steps: int, partition_id: str) -> Any:
        """verl's, and what a sampler does not want; one reason a group, since verl counts each under all it has."""
        stale, filtered, failed, counts = super()._terminal_eviction_reasons(global_steps, partition_id)
        unwanted = set(self.unwanted()) if partition_id == TRAIN else set()
        return stale, (filtered | unwanted) - stale, failed, counts

    def _evict_terminal_groups(self, global_steps: int, partition_id: str, eviction_reasons: Any) -> Any:
        """Remembers why each group is dropped; a failed one was dropped before its hand-over."""
        stale, filtered, failed, _ = eviction_reasons
        why = self.unwanted()
        for outcome, uids in (
            (GroupOutcome.STALE, stale),
            (GroupOutcome.FILTERED, filtered),
            (GroupOutcome.FAILED, failed),
        ):
            reasons = {uid: {"reason": why[uid]} if uid in why else {} for uid in uids}
            self.decided += [GroupDecided(uid, outcome, global_steps, reasons[uid]) for uid in uids]
        return super()._evict_terminal_groups(global_steps, partition_id, eviction_reasons)

    def take_decided(
        self, step: int, details: dict[str, Any], of_group: Mapping[str, dict[str, Any]]
    ) -> list[GroupDecided]:
        """What became of groups since the last call; those that were sampled were trained in `step`.

        `details` are those of all trained groups, `of_group` those of single ones, by prompt.
        """
        trained = [
            GroupDecided(uid, GroupOutcome.TRAINED, step, details | of_group.get(uid, {}), taken=at)
            for uid, at in self.sampled.items()
        ]
        groups, self.decided, self.sampled = [*self.decided, *trained], [], {}
        return groups

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
        """Waits until a group has ended, where verl sleeps."""
        self.wait()
        return last_debug_time

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
        if partition_id == VALIDATION and self.before_validated is not None:
            self.before_validated(batch_size)
        batch, metrics = super().sample(global_steps, partition_id, batch_size)
        if partition_id == VALIDATION:
            self.validated += [tag["max_global_steps"] for tag in batch.tags if "max_global_steps" in tag]
        return batch, metrics

    def validated_groups(self) -> int:
        """Groups of a validation that had ended at the last look at the queue, and were not taken."""
        return len(self.finished_keys[VALIDATION] | self.failure_keys[VALIDATION])

    def carried_over(self, step: int) -> dict[str, float]:
        """At a step's end: how many of the groups that it trained began in an earlier one, and how many go on.

        The next step's prompts may have been submitted by then; they are not counted.
        """
        trained, self.trained_from = self.trained_from, []
        self._sync_metadata_from_transfer_queue()
        submitted = self.prompt_global_steps[TRAIN]
        going = sum(submitted[uid] <= step for uid in self.pending_keys[TRAIN] | self.running_keys[TRAIN])
        earlier = sum(submitted < step for submitted in trained)
        return {"seamless/carried_over/trained": float(earlier), "seamless/carried_over/left": float(going)}

    def outstanding(self) -> int:
        """Prompts submitted and neither trained nor dropped."""
        return len(self.outstanding_prompts())

    def outstanding_prompts(self) -> list[str]:
        """Their uids, in the order in which they were submitted."""
        self._sync_metadata_from_transfer_queue()
        return list(self.prompt_global_steps[TRAIN])

    def defer(self, uids: Sequence[str], step: int) -> None:
        """Puts these prompts aside, whose groups have ended; nothing that was generated for them is kept."""
        self._sync_metadata_from_transfer_queue()  # some may have finished meanwhile
        put_aside(uids, step)
        self.decided += [GroupDecided(uid, GroupOutcome.DEFERRED, step) for uid in uids]
        self._clear_groups(TRAIN, set(uids))

    def finished(self) -> int:
        """Groups that were ready to be trained at the last look at the queue, and were not taken."""
        return len(self._ready())

    def oldest_finished(self) -> list[str]:
        """The keys of the rows of the oldest group that was ready at the last look, and was not taken."""
        ready = self._ready()
        oldest = next((uid for uid in self.prompt_global_steps[TRAIN] if uid in ready), None)
        return [] if oldest is None else [key for key in self.partitions[TRAIN] if prompt_of(key) == oldest]

    def _ready(self) -> set[str]:
        return set(self.finished_keys[TRAIN] - self.taken - set(self.unwanted()))

    def unfinished(self) -> int:
        """Groups that generated at the last look at the queue, validation's too."""
        return len(self.unfinished_uids())

    def unfinished_uids(self) -> list[str]:
        """The prompts of these groups; any thread may ask."""
        return [
            uid
            for status in (self.pending_keys, self.running_keys)
            for partition, uids in list(status.items())
            if partition != DEFERRED
            for uid in list(uids)
        ]

    def _materialize_batch(self, partition_id: str, uids: list[str], snapshot: dict[str, dict[str, Any]]) -> Any:
        """A batch in the order in which its prompts were submitted, so that sums round alike whichever ended first."""
        if partition_id == TRAIN:
            self.sampled |= dict.fromkeys(uids, time.time())
            self.taken = set(uids)
            self.trained_from += [self.prompt_global_steps[TRAIN][uid] for uid in uids]
        order = {uid: i for i, uid in enumerate(self.prompt_global_steps[partition_id])}

        def submission_order(key: str) -> tuple[int, list[int]]:
            uid, *within = key.rsplit("_", 2)
            return order.get(uid, len(order)), [int(number) for number in within if number.isdigit()]

        return super()._materialize_batch(
            partition_id, uids, {key: snapshot[key] for key in sorted(snapshot, key=submission_order)}
        )

    def _stale_terminal_keys(self, global_steps: int, partition_id: str) -> set[str]:
        if partition_id != TRAIN:
            return set()
        submitted = self.prompt_global_steps[partition_id]
        return {uid for uid in self.finished_keys[partition_id] if self.bound.too_old(global_steps, submitted[uid])}

    def _has_enough_samples(
        self, global_steps: int, partition_id: str, batch_size: int, sampleable_keys: set[str]
    ) -> bool:
        self.late, self.lacking = (), max(1, batch_size - len(sampleable_keys))
        if len(sampleable_keys) < batch_size:
            return False
        generating = self.pending_keys[partition_id] | self.running_keys[partition_id]
        if partition_id != TRAIN or not generating or self.defers:
            return True  # waiting would bring nothing
        submitted = self.prompt_global_steps[partition_id]
        finished = sorted(submitted[uid] for uid in sampleable_keys)[batch_size:]
        left_behind = [*finished, *(submitted[uid] for uid in generating)]
        if self.bound.keeps(step=global_steps, update=self.update(), left_behind=left_behind):
            return True
        oldest = min(submitted[uid] for uid in generating)
        self.late = tuple(sorted(uid for uid in generating if submitted[uid] == oldest))
        return False
