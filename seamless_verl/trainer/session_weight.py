"""Weighs a session once, however many training sequences it has: in the loss, in a group's statistics, in mini-batches.

verl counts rows, of which a session with branches or compactions has several. Here:

- *seq-mean-token-mean* averages over the tokens of each row, then over rows. Each row's mean is weighted with the
  row's share of its session's trained tokens. The other modes divide by what does not depend on rows.
- *Mini-batches* have a fixed number of sessions, and so has each optimizer step.
- *Estimators* that compare the outcomes of a group take one row of each session, and give the result to all its rows.

The law: a loss over sessions that are split into rows is the loss over the same sessions unsplit.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import AdvantageEstimator
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

from seamless_verl.agent_loops.row_keys import parts_of, session_of
from seamless_verl.trainer.losses import WEIGHT

BY_OUTCOME = frozenset(
    {
        AdvantageEstimator.GRPO,
        AdvantageEstimator.GRPO_VECTORIZED,
        AdvantageEstimator.GRPO_PASSK,
        AdvantageEstimator.RLOO,
        AdvantageEstimator.RLOO_VECTORIZED,
        AdvantageEstimator.GPG,
        AdvantageEstimator.REINFORCE_PLUS_PLUS_BASELINE,
    }
)
"""Estimators that give all trained tokens of a row one number, which depends on the rewards of the group alone."""


def row_weights(keys: Sequence[str], trained: Sequence[int]) -> list[float]:
    """Each row's share of its session's trained tokens; 1 where the session has none or one row."""
    totals: Counter[str] = Counter()
    for key, tokens in zip(keys, trained, strict=True):
        totals[session_of(key)] += tokens
    shares = zip(keys, trained, strict=True)
    return [tokens / total if (total := totals[session_of(key)]) else 1.0 for key, tokens in shares]


def put_row_weights(batch: Any) -> Any:
    """Writes the column WEIGHT for the batch's final masks, if it is needed; returns the batch."""
    if not has_split_sessions(batch.keys):
        return batch
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["response_mask"])
    weights = row_weights(batch.keys, [int(mask.sum()) for mask in data["response_mask"].unbind()])
    fields = TensorDict({WEIGHT: torch.tensor(weights)[:, None]}, batch_size=len(batch))
    return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)


def has_split_sessions(keys: Sequence[str]) -> bool:
    """Whether a session has more than one row."""
    return len({session_of(key) for key in keys}) < len(keys)


def advantage_by_session(data: Any, batch_keys: Sequence[str], adv_estimator: Any, **arguments: Any) -> Any:
    """`compute_advantage_for_multi_trajectories` of verl, with each session counted once for all of BY_OUTCOME.

    A session's row is the last one with a token to train. verl takes the last row, and gives a session of which the
    last row was masked whole the advantage 0; it counts each row for estimators other than GRPO.
    """
    if adv_estimator not in BY_OUTCOME or not has_split_sessions(batch_keys):
        return compute_advantage_for_multi_trajectories(
            data, batch_keys=batch_keys, adv_estimator=adv_estimator, **arguments
        )
    sessions = rows_of_sessions(batch_keys)
    chosen = outcome_rows(batch_keys, data.batch["response_mask"], sessions)
    outcome = compute_advantage(data.select_idxs(chosen), adv_estimator=adv_estimator, **arguments)
    return put_advantages(data, sessions, outcome)


def rows_of_sessions(batch_keys: Sequence[str]) -> list[list[int]]:
    """The rows of each session, sessions in the order of their first rows."""
    rows = defaultdict[str, list[int]](list)
    for i, key in enumerate(batch_keys):
        rows[session_of(key)].append(i)
    return list(rows.values())


def outcome_rows(keys: Sequence[str], mask: torch.Tensor, sessions: Sequence[Sequence[int]]) -> list[int]:
    """Of each session its last row with a token to train, which stands for it; the last one if there is none.

    `mask` is that of the responses, [rows, response].
    """
    return [max(rows, key=lambda i: (bool(mask[i].any()), int(parts_of(keys[i])[2]))) for rows in sessions]


def put_advantages(data: Any, sessions: Sequence[Sequence[int]], outcome: Any) -> Any:
    """Gives the advantage of each session's row in `outcome` to all its trained tokens in `data`; returns `data`."""
    mask = data.batch["response_mask"]
    first = outcome.batch["response_mask"].argmax(dim=1)
    advantages = torch.zeros_like(data.batch["token_level_rewards"])
    for number, rows in enumerate(sessions):
        advantages[list(rows)] = outcome.batch["advantages"][number, first[number]] * mask[list(rows)]
    data.batch["advantages"] = data.batch["returns"] = advantages
    return data


MICRO_BATCHES = (
    ("actor_rollout_ref.actor.use_dynamic_bsz", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"),
    ("actor_rollout_ref.actor.use_dynamic_bsz", "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu"),
    ("actor_rollout_ref.ref.log_prob_use_dynamic_bsz", "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu"),
    ("critic.use_dynamic_bsz", "critic.ppo_micro_batch_size_per_gpu"),
    ("critic.use_dynamic_bsz", "critic.forward_micro_batch_size_per_gpu"),
)


def fixed_micro_batches(config: Any) -> list[int]:
    """The sizes of micro-batches that do not follow from tokens: a rank's rows must be a multiple of each."""
    sizes = [OmegaConf.select(config, key) for dynamic, key in MICRO_BATCHES if not OmegaConf.select(config, dynamic)]
    return [int(size) for size in sizes if size] or [1]


def optimizer_steps(config: Any, prompts: int) -> int:
    """Of an update of so many prompts, in mini-batches of the config of actor or critic."""
    return max(1, prompts // int(config.ppo_mini_batch_size))


def rows_multiple(config: Any, prompts: int, dp_size: int, *, critic: bool) -> int:
    """Rows of a batch are padded to a multiple of this; each mini-batch has as many, and each rank of each."""
    trained = [config.actor_rollout_ref.actor, *([config.critic] if critic else [])]
    steps = [optimizer_steps(one, prompts) for one in trained]
    return dp_size * math.lcm(*steps) * math.lcm(*fixed_micro_batches(config))


@contextmanager
def mini_batches_of(group: Any, method: str, rows: int) -> Iterator[None]:
    """In the block, `method` of a worker group updates with mini-batches of `rows` rows, whatever verl asks for.

    What a loss is divided by, verl's `global_batch_size`, stays the configured number of sessions.
    """
    update = getattr(group, method)

    def with_rows(batch: Any) -> Any:
        batch.extra_info["mini_batch_size"] = rows
        return update(batch)

    setattr(group, method, with_rows)
    try:
        yield
    finally:
        setattr(group, method, update)
