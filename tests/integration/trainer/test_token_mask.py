"""The mask a batch is trained by follows the weight versions of its tokens, and masked tokens count as dropped."""

from __future__ import annotations

import pytest

from seamless_verl.trajectory.account import Account, DropReason
from seamless_verl.trajectory.policies import make_policy

VERSIONS = [1, 1, 2, -1, 3]
MASK = [1, 1, 1, 0, 1]
ACCOUNT = Account(generated=100, trained=80, dropped={DropReason.SESSION: 15, DropReason.STALE: 5})
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


@pytest.mark.parametrize("masked", [0, 30, 80])
def test_masked_tokens_are_dropped_and_the_account_still_adds_up(masked: int) -> None:
    from seamless_verl.trainer.token_mask import drop_masked

    before = ACCOUNT.metrics() | {"fleet/serving": 2.0}
    metrics = drop_masked(before, masked)
    dropped = {name: value for name, value in metrics.items() if name.startswith("tokens/dropped/")}
    assert metrics["tokens/generated"] == metrics["tokens/trained"] + sum(dropped.values()) == 100
    assert metrics["tokens/trained"] == 80 - masked and metrics[f"tokens/dropped/{DropReason.STALE}"] == 5 + masked
    unchanged = before.keys() - {"tokens/trained", f"tokens/dropped/{DropReason.STALE}"}
    assert {name: metrics[name] for name in unchanged} == {name: before[name] for name in unchanged}
    assert before == ACCOUNT.metrics() | {"fleet/serving": 2.0}, "the caller's metrics changed"


@pytest.mark.parametrize("masked", [81, 1000])
def test_an_account_that_restarted_with_its_data_plane_is_never_below_zero(masked: int) -> None:
    from seamless_verl.trainer.token_mask import drop_masked

    metrics = drop_masked(ACCOUNT.metrics(), masked)
    dropped = {reason: int(metrics[f"tokens/dropped/{reason}"]) for reason in DropReason}
    account = Account(int(metrics["tokens/generated"]), int(metrics["tokens/trained"]), dropped)
    account.check_integrity()
    assert (account.trained, dropped[DropReason.STALE], dropped[DropReason.SESSION]) == (0, 85, 15)


def test_a_run_without_a_token_account_keeps_its_metrics() -> None:
    from seamless_verl.trainer.token_mask import drop_masked

    assert drop_masked({"fleet/serving": 2.0}, 7) == {"fleet/serving": 2.0}
