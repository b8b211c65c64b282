"""The mask a batch is trained by follows the weight versions of its tokens."""

from __future__ import annotations

import pytest
import torch

from seamless_verl.trainer.freshness import masks
from seamless_verl.trajectory.policies import policy

VERSIONS = torch.tensor([1, 1, 2, -1, 3])
MASK = torch.tensor([1, 1, 1, 0, 1])


@pytest.mark.parametrize(
    ("name", "older_than", "expected"),
    [
        ("train_all", 0, [1, 1, 1, 0, 1]),
        ("mask_older_than", 1, [0, 0, 1, 0, 1]),
        ("drop_if_older_than", 1, [0, 0, 0, 0, 0]),
        ("drop_if_older_than", 2, [1, 1, 1, 0, 1]),
        ("fresh_tail_only", 0, [0, 0, 0, 0, 1]),
    ],
)
def test_the_policy_decides_which_tokens_are_trained(name: str, older_than: int, expected: list[int]) -> None:
    (mask,) = masks([(VERSIONS, MASK)], policy(name, older_than), trainer_version=3)
    assert mask.tolist() == expected and mask.dtype == MASK.dtype
