"""The mask a batch is trained by follows the weight versions of its tokens; how far its logprobs agree."""

from __future__ import annotations

import pytest

from seamless_verl.trajectory.policies import make_policy

VERSIONS = [1, 1, 2, -1, 3]
MASK = [1, 1, 1, 0, 1]
pytestmark = pytest.mark.integration


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


def test_the_difference_of_logprobs_is_given_apart_for_tokens_of_grammars() -> None:
    import torch

    from seamless_verl.trainer.token_mask import agreement_of

    trainer, rollout = torch.tensor([-1.0, -2.0, -3.0, -4.0]), torch.tensor([-1.5, -2.0, -3.0, -3.0])
    found = agreement_of(trainer, rollout, torch.tensor([0, 0, 1, 2]))
    assert found == {
        "training/rollout_logprob_diff_max": 1.0,
        "seamless/agreement/plain/tokens": 2.0,
        "seamless/agreement/plain/mean": 0.25,
        "seamless/agreement/plain/max": 0.5,
        "seamless/agreement/grammar/tokens": 2.0,
        "seamless/agreement/grammar/mean": 0.5,
        "seamless/agreement/grammar/max": 1.0,
    }
    assert agreement_of(trainer[:0], rollout[:0], torch.tensor([], dtype=torch.int64)) == {}
