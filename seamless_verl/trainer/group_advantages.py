"""Advantages of groups that have ended are computed while an update runs, for the batches that come next.

An estimator that compares the samples of a group with each other alone gives a group the same advantages in whatever
batch it is trained. So they need not wait until a batch is taken, when devices that train wait for them.

Owned state: of each group whose advantages are in TransferQueue, and that is not trained yet, which rows they are of.
A group that has other rows by then, as one that was reopened has, gets them anew.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.core_algos import AdvantageEstimator

from seamless_verl.agent_loops.rows import prompt_of

OF_ONE_GROUP = frozenset(
    {
        AdvantageEstimator.GRPO,
        AdvantageEstimator.GRPO_VECTORIZED,
        AdvantageEstimator.RLOO,
        AdvantageEstimator.RLOO_VECTORIZED,
    }
)
"""verl's estimators by which a group's advantages depend on its own rewards alone, also where it has one sample."""

Brief = Mapping[str, list[float]]


def follow_from_groups(config: Any) -> bool:
    """Whether a run's advantages follow from the rows of single groups, as the agent loops write them.

    Not where a reference's or a recomputed logprob has a part in them.
    """
    correction = config.algorithm.get("rollout_correction", None)
    recomputed = correction is not None and not correction.get("bypass_mode", False)
    return config.algorithm.adv_estimator in OF_ONE_GROUP and not recomputed and not config.algorithm.use_kl_in_reward


class GroupAdvantages:
    """Which groups have their advantages, and these in brief, where they are wanted."""

    def __init__(self) -> None:
        self.rows: dict[str, frozenset[str]] = {}
        self.briefs: dict[str, Brief] = {}

    def __contains__(self, uid: str) -> bool:
        return uid in self.rows

    def add(self, batch: Any, briefs: Mapping[str, Brief]) -> None:
        """The advantages of the rows of `batch`, which are whole groups, are in TransferQueue; `briefs` by group."""
        self.rows |= {uid: frozenset(keys) for uid, keys in by_group(batch.keys).items()}
        self.briefs |= briefs

    def lacking(self, batch: Any) -> list[int]:
        """The places of the rows of a batch that have none; padding has none."""
        whole = {uid for uid, keys in by_group(batch.keys).items() if self.rows.get(uid) == frozenset(keys)}
        return [i for i, key in enumerate(batch.keys) if prompt_of(key) not in whole]

    def take(self, uids: AbstractSet[str]) -> dict[str, Brief]:
        """These groups are trained or dropped: forgets them, and returns what it had of them in brief."""
        for uid in uids:
            self.rows.pop(uid, None)
        return {uid: brief for uid in uids if (brief := self.briefs.pop(uid, None)) is not None}

    def keep_only(self, uids: AbstractSet[str]) -> None:
        """Forgets all other groups: they were dropped."""
        self.take(self.rows.keys() - uids)


def rows_at(batch: KVBatchMeta, places: Sequence[int]) -> KVBatchMeta:
    """These rows of a batch."""
    keys, tags = [batch.keys[i] for i in places], [batch.tags[i] for i in places]
    return KVBatchMeta(keys=keys, tags=tags, partition_id=batch.partition_id)


def with_all_columns(batch: Any) -> Any:
    """The batch as after a write to it: with the names of all columns that its rows have, and none of verl's flags.

    What a reference's forward pass is told would else be told to the update.
    """
    return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, tags=batch.tags)


def by_group(keys: Sequence[str]) -> dict[str, list[str]]:
    found = defaultdict[str, list[str]](list)
    for key in keys:
        found[prompt_of(key)].append(key)
    return found
