"""This package's estimators in the place of verl's: one row of each session, and what is left out of training."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.integration
KEYS = ["u_0_0", "u_0_1", "u_1_0", "u_2_0", "u_2_1"]  # sessions of two rows, of one and of two
MASKS = [[1, 1], [1, 0], [1, 1], [1, 0], [0, 0]]
REWARDS = [0.0, 0.0, 1.0, 0.5, 0.5]
LOG_PROBS = [[-1.0, -1.0], [-4.0, -9.0], [-2.5, -2.5], [-2.0, -9.0], [-9.0, -9.0]]  # means -2, -2.5 and -2


def estimate(
    name: str, keys: list[str], rewards: list[float], masks: list[list[int]], *of_turns: Any
) -> tuple[Any, list[list[float]]]:
    """The call, and the advantages of rows of which each has its reward on its last token."""
    import numpy as np
    import torch
    from verl import DataProto

    from seamless_verl.trainer.advantages import OwnEstimate

    mask = torch.tensor(masks)
    scores = torch.zeros(mask.shape)
    scores[:, -1] = torch.tensor(rewards)
    columns = {
        "response_mask": mask,
        "token_level_rewards": scores,
        "old_log_probs": torch.tensor(LOG_PROBS[: len(keys)]),
    }
    groups = {"uid": np.array([key.split("_")[0] for key in keys], dtype=object)}
    own = OwnEstimate(*of_turns)
    made = own(DataProto.from_dict(columns, groups), batch_keys=keys, adv_estimator=name, gamma=1.0, lam=1.0, config={})
    assert made.batch["returns"] is made.batch["advantages"]
    return own, made.batch["advantages"].tolist()


def test_the_median_is_of_sessions_and_all_rows_of_the_pivot_are_left_out() -> None:
    """Of the rewards 0, 0.5 and 1 the median session has a second row without a token to train."""
    own, found = estimate("mc_grpo", KEYS, REWARDS, MASKS)
    loses, wins = -0.5 / 0.501 * 3 / 2, 0.5 / 0.501 * 3 / 2
    assert found[0] == pytest.approx([loses, loses]) and found[1] == pytest.approx([loses, 0.0])
    assert found[2] == pytest.approx([wins, wins]) and found[3] == found[4] == [0.0, 0.0]
    assert own.untrained == ["u_2_0"]


def test_a_pivot_of_two_rows_is_left_out_whole() -> None:
    own, _ = estimate("mc_grpo", KEYS, [0.6, 0.6, 1.0, 0.5, 0.5], MASKS)
    assert own.untrained == ["u_0_0", "u_0_1"]


def test_verls_padding_is_no_pivot() -> None:
    own, _ = estimate("mc_grpo", ["u_0_0", "u_1_0", "u_2_0", "pad_0_0"], [0.0, 0.5, 1.0, 0.0], [*[[1, 1]] * 3, [0, 0]])
    assert own.untrained == ["u_1_0"]


def test_the_logprob_of_a_session_is_of_all_its_trained_tokens() -> None:
    """GRPO has 0.5, 0, -0.5 of a deviation of 0.5; the winner's mean is -2.5, the group's -6.5 / 3: eta = e^(-1/3)."""
    own, found = estimate("grpo_novelty", KEYS, REWARDS, MASKS)
    bonus = min(2.5 * (1 - 2.718281828 ** (-1 / 3)), 0.5)
    assert bonus == 0.5, "which is the bound"
    assert found[2] == pytest.approx([1.5, 1.5], rel=1e-4) and found[0] == pytest.approx([-1.0, -1.0], rel=1e-4)
    assert own.metrics == {"seamless/novelty/bonus": pytest.approx(0.5, rel=1e-4)} and own.untrained == []


def test_the_mean_logprobs() -> None:
    import torch

    from seamless_verl.trainer.advantages import mean_log_probs

    found = mean_log_probs(torch.tensor(LOG_PROBS), torch.tensor(MASKS), [[0, 1], [2], [3, 4], [4]])
    assert found[:3].tolist() == pytest.approx([-2.0, -2.5, -2.0]) and found[3].isnan()


def test_an_estimator_of_turns_gets_all_rows_and_reads_the_row_with_the_sessions_reward() -> None:
    """Returns at the observation 7: 0.95 x 1 + 0.5 of session 0, 0 of session 1 and 0.5 of session 2."""
    import torch

    from seamless_verl.algorithms.estimate import RowTurns

    def row(turn: list[int], observation: list[int], reward: float = 0.0) -> RowTurns:
        return RowTurns(torch.tensor(turn), torch.tensor(observation), torch.full((len(turn),), reward))

    turns = {
        "u_0_0": row([0, 0], [7, 7], 0.5),
        "u_0_1": row([1], [8]),
        "u_1_0": row([0, -1], [7, 0]),
        "u_2_0": row([0], [7]),
        "u_2_1": row([0, 0], [7, 7]),
    }
    own, found = estimate("hgpo", KEYS, [1, 1, 0, 0.5, 0.5], MASKS, turns)
    high, low, middle = ((value - 0.65) / (1.085 / 3) ** 0.5 for value in (1.45, 0, 0.5))  # by mean and deviation
    assert found[0] == pytest.approx([high, high], abs=1e-4) and found[1] == [0, 0], "alone with the observation 8"
    assert found[2] == pytest.approx([low, 0], abs=1e-4) and found[3] == pytest.approx([middle, 0], abs=1e-4)
    assert own.metrics == {"seamless/hgpo/compared": pytest.approx(4 / 6)} and own.untrained == []
