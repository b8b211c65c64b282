"""A session weighs once: verl's own losses and estimators, on numbers that are worked out by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.integration
MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
SPLIT = {"u_0_0": [8.0], "u_0_1": [0.0, 0.0, 0.0], "u_1_0": [2.0, 6.0]}  # advantages of the rows' tokens
WHOLE = {"u_0_0": [8.0, 0.0, 0.0, 0.0], "u_1_0": [2.0, 6.0]}


def policy_loss(rows: dict[str, list[float]], mode: str, *, weighted: bool, everything: bool = False) -> float:
    """verl's `ppo_loss` of one micro-batch, of two sessions; with `everything` the ratios are not 1, and entropy and
    KL terms are in it."""
    import torch
    from verl.utils import tensordict_utils as tu
    from verl.workers.config import McoreActorConfig
    from verl.workers.utils.losses import ppo_loss

    from seamless_verl.trainer.losses import WEIGHT, weighs_sessions
    from seamless_verl.trainer.session_weight import row_weights

    config = McoreActorConfig(
        strategy="megatron",
        ppo_mini_batch_size=2,
        ppo_micro_batch_size_per_gpu=1,
        rollout_n=1,
        loss_agg_mode=mode,
        loss_scale_factor=5,
        use_kl_loss=everything,
        kl_loss_coef=0.25,
        entropy_coeff=0.5,
    )

    def nested(values: list[list[float]], dtype: Any = torch.float32) -> Any:
        return torch.nested.as_nested_tensor([torch.tensor(row, dtype=dtype) for row in values], layout=torch.jagged)

    advantages = list(rows.values())
    noise = [[0.01 * (value + 1) if everything else 0.0 for value in row] for row in advantages]
    old = [[-1.0 for _ in row] for row in advantages]
    tokens = sum(map(len, advantages))
    columns = {
        "prompts": nested([[1.0]] * len(rows), torch.int64),
        "responses": nested(advantages, torch.int64),
        "response_mask": nested([[1.0] * len(row) for row in advantages], torch.int64),
        "old_log_probs": nested(old),
        "ref_log_prob": nested([[-1.2 for _ in row] for row in advantages]),
        "advantages": nested(advantages),
    }
    if weighted:
        columns[WEIGHT] = torch.tensor(row_weights(list(rows), [len(row) for row in advantages]))[:, None]
    sizes = {"dp_size": 1, "batch_num_tokens": tokens, "global_batch_size": 2}
    data = tu.get_tensordict(columns, sizes)
    log_probs = nested([[a + b for a, b in zip(*both, strict=True)] + [0.0] for both in zip(old, noise, strict=True)])
    entropy = nested([[abs(value) + 0.5 for value in row] + [0.0] for row in advantages])
    output = {"log_probs": log_probs, **({"entropy": entropy} if everything else {})}
    loss, _ = weighs_sessions(lambda **given: ppo_loss(config, **given))(model_output=output, data=data)
    return float(loss)


@pytest.mark.parametrize(
    ("mode", "verls", "ours"),
    [
        ("token-mean", -16 / 6, -16 / 6),  # 16 over the 6 tokens, whatever the rows
        ("token-sum", -16, -16),
        ("seq-mean-token-sum", -16 / 2, -16 / 2),  # each session's sum, over the 2 sessions of the mini-batch
        ("seq-mean-token-sum-norm", -16 / 2 / 5, -16 / 2 / 5),
        ("seq-mean-token-mean", -(8 + 0 + 4) / 2, -(8 / 4 + 4) / 2),  # row means 8, 0, 4; session means 2, 4
    ],
)
def test_the_loss_by_hand(mode: str, verls: float, ours: float) -> None:
    assert policy_loss(SPLIT, mode, weighted=False) == pytest.approx(verls)
    assert policy_loss(SPLIT, mode, weighted=True) == pytest.approx(ours)


@pytest.mark.parametrize("mode", MODES)
def test_to_split_a_session_changes_no_term_of_the_loss(mode: str) -> None:
    whole = policy_loss(WHOLE, mode, weighted=False, everything=True)
    assert policy_loss(SPLIT, mode, weighted=True, everything=True) == pytest.approx(whole, rel=1e-5)
    if mode == "seq-mean-token-mean":
        assert policy_loss(SPLIT, mode, weighted=False, everything=True) != pytest.approx(whole, rel=0.1)


def test_a_row_weighs_its_share_of_what_is_trained() -> None:
    from seamless_verl.trainer.session_weight import row_weights

    keys = ["u_0_0", "u_0_1", "u_1_0", "pad_0_0", "u_0_2"]
    assert row_weights(keys, [1, 3, 2, 0, 0]) == [0.25, 0.75, 1.0, 1.0, 0.0]


def advantages(
    keys: list[str], rewards: list[float], masks: list[list[int]], estimator: str, *, ours: bool, **more: Any
) -> Any:
    """The advantages of rows, of which each has its reward on its last token."""
    import numpy as np
    import torch
    from verl import DataProto
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

    from seamless_verl.trainer.session_weight import advantage_by_session

    mask = torch.tensor(masks)
    scores = torch.zeros(mask.shape)
    scores[:, -1] = torch.tensor(rewards)
    data = DataProto.from_dict({"response_mask": mask, "token_level_rewards": scores}, {"uid": np.array(keys, object)})
    data.non_tensor_batch["uid"] = np.array([key.split("_")[0] for key in keys], dtype=object)
    compute = advantage_by_session if ours else compute_advantage_for_multi_trajectories
    made = compute(data, batch_keys=keys, adv_estimator=estimator, norm_adv_by_std_in_grpo=False, config={}, **more)
    return made.batch["advantages"].tolist()


ESTIMATORS = ("grpo", "rloo", "rloo_vectorized", "grpo_vectorized", "grpo_passk", "gpg", "reinforce_plus_plus_baseline")
KEYS, REWARDS = ["u_0_0", "u_0_1", "u_0_2", "u_1_0", "u_2_0"], [1.0, 1.0, 1.0, 0.0, 0.5]
ALL = [[1, 1]] * 5


@pytest.mark.parametrize(
    ("estimator", "ours", "verls"),
    [
        # mean of the three sessions 0.5; verl counts GRPO's sessions once, too
        ("grpo", [0.5, -0.5, 0.0], [0.5, -0.5, 0.0]),
        # each reward less the mean of the others: 1 - 0.25, 0 - 0.75, 0.5 - 0.5. verl has five: 1 - 2.5 / 4, ...
        ("rloo", [0.75, -0.75, 0.0], [0.375, -0.875, -0.25]),
        ("rloo_vectorized", [0.75, -0.75, 0.0], [0.375, -0.875, -0.25]),
        # less the mean, by the deviation: 0.5 and 0.5 of three sessions, 0.7 and sqrt(0.2) of five rows
        ("grpo_vectorized", [1.0, -1.0, 0.0], [0.67082, -1.56525, -0.44721]),
        # the best less the second, by the deviation: (1 - 0.5) / 0.5; of verl's rows both are 1
        ("grpo_passk", [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]),
        # times all by those that are not 0: 3 / 2 of sessions, 5 / 4 of rows
        ("gpg", [0.75, -0.75, 0.0], [0.375, -0.875, -0.25]),
        # less the mean 0.5, then less the mean over tokens, 0.2 of 6, 2 and 2, by their deviation: sqrt(1.6 / 9)
        ("reinforce_plus_plus_baseline", [0.71151, -1.66019, -0.47434], [0.71151, -1.66019, -0.47434]),
    ],
)
def test_a_group_counts_each_session_once(estimator: str, ours: list[float], verls: list[float]) -> None:
    for expected, by_session in ((ours, True), (verls, False)):
        found = advantages(KEYS, REWARDS, ALL, estimator, ours=by_session)
        first, *_, second, third = expected
        assert [row[0] for row in found] == pytest.approx([first, first, first, second, third], abs=1e-4), by_session


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_to_split_a_session_or_to_pad_the_batch_changes_no_advantage(estimator: str) -> None:
    """Of two prompts, of one of which a session has three rows; verl pads with rows of one more prompt."""
    rewards, padding = [1.0, 0.0, 0.25, 0.5, 2.0], {"pad_0_0"}
    whole = ["u_0_0", "u_1_0", "v_0_0", "v_1_0", "v_2_0"]
    masks = [[1] * 6, [1] * 2 + [0] * 4, [1, 0, 0, 0, 0, 0], [1] * 5 + [0], [0, 1, 1, 0, 0, 0]]
    expected = [max(row, key=abs) for row in advantages(whole, rewards, masks, estimator, ours=True)]
    keys = ["u_0_0", "u_1_0", "u_0_1", "v_0_0", "v_1_0", "u_0_2", "v_2_0", "pad_0_0"]
    sessions = [0, 1, 0, 2, 3, 0, 4]
    rows = [[1, 1, 1, 0, 0, 0], masks[1], [1, 1, 0, 0, 0, 0], *masks[2:4], [0, 0, 1, 0, 0, 0], masks[4], [0] * 6]
    of_rows = [*(rewards[session] for session in sessions), 0.0]
    found = advantages(keys, of_rows, rows, estimator, ours=True, padding=padding)
    for row, mask, session in zip(found, rows, sessions, strict=False):
        assert row == pytest.approx([expected[session] * trained for trained in mask], abs=1e-5)
    assert found[-1] == [0.0] * 6
    padded = advantages([*whole, "pad_0_0"], [*rewards, 0.0], [*masks, [0] * 6], estimator, ours=True, padding=padding)
    assert [max(row, key=abs) for row in padded] == pytest.approx([*expected, 0.0], abs=1e-5)


def test_a_session_whose_last_row_is_masked_keeps_its_advantage() -> None:
    masks = [[1, 1], [1, 0], [0, 0], [1, 1], [1, 1]]
    assert advantages(KEYS, REWARDS, masks, "grpo", ours=False)[0] == [0.0, 0.0]
    assert advantages(KEYS, REWARDS, masks, "grpo", ours=True)[:3] == [[0.5, 0.5], [0.5, 0.0], [0.0, 0.0]]


def test_a_mini_batch_has_a_share_of_the_rows_for_the_length_of_an_update() -> None:
    from seamless_verl.trainer.session_weight import mini_batches_of

    asked: list[dict[str, int]] = []
    group = SimpleNamespace(update_actor=lambda batch: asked.append(dict(batch.extra_info)))
    batch = SimpleNamespace(extra_info={"mini_batch_size": 64, "global_batch_size": 64})
    with mini_batches_of(group, "update_actor", 48):
        group.update_actor(batch)
    batch.extra_info["mini_batch_size"] = 64
    group.update_actor(batch)
    assert asked == [{"mini_batch_size": 48, "global_batch_size": 64}, {"mini_batch_size": 64, "global_batch_size": 64}]
