"""The mask a batch is trained by follows the weight versions of its tokens."""

from __future__ import annotations

import pytest

from seamless_verl.trajectory.policies import make_policy

VERSIONS = [1, 1, 2, -1, 3]
MASK = [1, 1, 1, 0, 1]


@pytest.mark.integration
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
    import torch

    from seamless_verl.trainer.token_mask import masks

    given = torch.tensor(MASK)
    (mask,) = masks([(torch.tensor(VERSIONS), given)], make_policy(name, older_than), trainer_version=3)
    assert mask.tolist() == expected and mask.dtype == given.dtype
