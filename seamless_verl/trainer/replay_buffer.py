"""verl's replay buffer with a bound on the staleness of the groups that the trainer takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

from seamless_verl.resources.staleness import StalenessBound

TRAIN = "train"


class SeamlessReplayBuffer(ReplayBufferAsync):
    """verl's asynchronous buffer under a `StalenessBound`.

    Sampling takes the oldest finished groups. It waits while that would leave a group behind that could then not be
    trained in time. A group may still exceed the bound, for example after a resume with a smaller one. It is dropped,
    counted under `training/off_policy/evicted_samples`, and replaced by a fresh prompt.
    """

    def __init__(
        self, *, bound: StalenessBound, update: Callable[[], int], wait: Callable[[], None], **kwargs: Any
    ) -> None:
        kwargs.update(max_off_policy_threshold=bound.max_staleness + 1, max_off_policy_strategy="wait")
        super().__init__(**kwargs)
        self.bound, self.update, self.wait = bound, update, wait

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
        """Waits until a group has ended, where verl sleeps."""
        self.wait()
        return last_debug_time

    def outstanding(self) -> int:
        """Prompts submitted and neither trained nor dropped."""
        self._sync_metadata_from_transfer_queue()
        return len(self.prompt_global_steps[TRAIN])

    def finished(self) -> int:
        """Groups that were ready to be trained at the last look at the queue."""
        return len(self.finished_keys[TRAIN])

    def _materialize_batch(self, partition_id: str, uids: list[str], snapshot: dict[str, dict[str, Any]]) -> Any:
        """A batch in the order in which its prompts were submitted, so that sums round alike whichever ended first."""
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
        if len(sampleable_keys) < batch_size:
            return False
        generating = self.pending_keys[partition_id] | self.running_keys[partition_id]
        if partition_id != TRAIN or not generating:
            return True  # waiting would bring nothing
        submitted = self.prompt_global_steps[partition_id]
        finished = sorted(submitted[uid] for uid in sampleable_keys)[batch_size:]
        left_behind = [*finished, *(submitted[uid] for uid in generating)]
        return self.bound.keeps(step=global_steps, update=self.update(), left_behind=left_behind)
