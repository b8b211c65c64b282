"""Weighs a session once, however many training sequences it has: in the loss, in a group's statistics, in mini-batches.

verl counts rows, of which a session with branches or compactions has several. Here:

- *seq-mean-token-mean* averages over the tokens of each row, then over rows. Each row's mean is weighted with the
  row's share of its session's trained tokens. The other modes divide by what does not depend on rows.
- *Mini-batches* are as many as without a split, of equally many rows; their sessions are a fixed number in the mean.
- *Estimators* that compare the outcomes of a group take each session as one row, with as many tokens to train as all
  its rows have, and give the result to all of them. verl's padding counts as no session.

The law: a loss over sessions that are split into rows is the loss over the same sessions unsplit.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
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
BY_TOKENS = frozenset({AdvantageEstimator.REINFORCE_PLUS_PLUS_BASELINE})
"""Of these, those that whiten over all tokens: the number depends on how many there are, too."""


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


def advantage_by_session(
    data: Any, batch_keys: Sequence[str], adv_estimator: Any, *, padding: Collection[str] = (), **arguments: Any
) -> Any:
    """`compute_advantage_for_multi_trajectories` of verl, with each session counted once for all of BY_OUTCOME.

    verl takes the last row of a session, and gives one of which that was masked whole the advantage 0; it counts each
    row for estimators other than GRPO, and its padding, whose keys are `padding`, as sessions of one more prompt.
    """
    sessions = rows_of_sessions(batch_keys, padding)
    if adv_estimator not in BY_OUTCOME or len(sessions) in (0, len(batch_keys)):
        return compute_advantage_for_multi_trajectories(
            data, batch_keys=batch_keys, adv_estimator=adv_estimator, **arguments
        )
    whole = outcomes(data, batch_keys, sessions, by_tokens=adv_estimator in BY_TOKENS)
    outcome = compute_advantage(whole, adv_estimator=adv_estimator, **arguments)
    return put_advantages(data, sessions, outcome)


def rows_of_sessions(batch_keys: Sequence[str], padding: Collection[str] = ()) -> list[list[int]]:
    """The rows of each session, sessions in the order of their first rows; none for rows of these keys."""
    rows = defaultdict[str, list[int]](list)
    for i, key in enumerate(batch_keys):
        if key not in padding:
            rows[session_of(key)].append(i)
    return list(rows.values())


def outcomes(data: Any, keys: Sequence[str], sessions: Sequence[Sequence[int]], *, by_tokens: bool) -> Any:
    """A row of each session, unsplit: its reward in the first column, and a mask of all its tokens to train.

    Of its rows the one that `outcome_rows` chooses has its reward. Where it is not `by_tokens` one stands for all.
    """
    mask = data.batch["response_mask"]
    chosen = data.select_idxs(outcome_rows(keys, mask, sessions))
    tokens = torch.stack([mask[list(rows)].sum() for rows in sessions])
    tokens = tokens if by_tokens else tokens.clamp(max=1)
    places = torch.arange(max(1, int(tokens.max())))
    rewards = chosen.batch["token_level_rewards"]
    reward = torch.zeros(len(sessions), len(places), dtype=rewards.dtype)
    reward[:, 0] = rewards.sum(dim=-1)
    chosen.batch["token_level_rewards"] = reward
    chosen.batch["response_mask"] = (places < tokens[:, None]).to(mask.dtype)
    return chosen


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
