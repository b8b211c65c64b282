"""Tokens that the trainer masked are dropped in the account's metrics, which still add up."""

from __future__ import annotations

import pytest

from seamless_verl.trajectory.account import Account, DropReason, drop_masked

ACCOUNT = Account(generated=100, trained=80, dropped={DropReason.SESSION: 15, DropReason.STALE: 5})


@pytest.mark.parametrize("masked", [0, 30, 80])
def test_masked_tokens_are_dropped_and_the_account_still_adds_up(masked: int) -> None:
    before = ACCOUNT.metrics() | {"fleet/serving": 2.0}
    metrics = drop_masked(before, masked)
    dropped = {name: value for name, value in metrics.items() if name.startswith("tokens/dropped/")}
    assert metrics["tokens/generated"] == metrics["tokens/trained"] + sum(dropped.values()) == 100
    assert metrics["tokens/trained"] == 80 - masked and metrics[f"tokens/dropped/{DropReason.STALE}"] == 5 + masked
    unchanged = before.keys() - {"tokens/trained", f"tokens/dropped/{DropReason.STALE}"}
    assert {name: metrics[name] for name in unchanged} == {name: before[name] for name in unchanged}
    assert before == ACCOUNT.metrics() | {"fleet/serving": 2.0}, "the caller's metrics changed"


def test_what_is_masked_for_two_reasons_is_dropped_for_both() -> None:
    metrics = drop_masked(drop_masked(ACCOUNT.metrics(), 30), 20, DropReason.PIVOT)
    assert metrics["tokens/trained"] == 30
    assert metrics["tokens/dropped/stale"] == 35 and metrics["tokens/dropped/pivot"] == 20


@pytest.mark.parametrize("masked", [81, 1000])
def test_an_account_that_restarted_with_its_data_plane_is_never_below_zero(masked: int) -> None:
    metrics = drop_masked(ACCOUNT.metrics(), masked)
    dropped = {reason: int(metrics[f"tokens/dropped/{reason}"]) for reason in DropReason}
    account = Account(int(metrics["tokens/generated"]), int(metrics["tokens/trained"]), dropped)
    account.check_integrity()
    assert (account.trained, dropped[DropReason.STALE], dropped[DropReason.SESSION]) == (0, 85, 15)


def test_a_run_without_a_token_account_keeps_its_metrics() -> None:
    assert drop_masked({"fleet/serving": 2.0}, 7) == {"fleet/serving": 2.0}
