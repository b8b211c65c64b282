"""Staleness policies decide by version alone; accounts add up."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seamless_verl.errors import ConfigError, IntegrityError
from seamless_verl.trajectory.account import Account, DropReason
from seamless_verl.trajectory.policies import POLICIES, TokenPolicy, TokenView, make_policy


def view(versions: list[int], trainer_version: int) -> TokenView:
    """-1 stands for context."""
    known = np.asarray(versions, np.int32)
    return TokenView(known, known >= 0, trainer_version)


def decided(name: str, versions: list[int], trainer_version: int, max_staleness: int = 0) -> list[int]:
    return make_policy(name, max_staleness).decide(view(versions, trainer_version)).astype(int).tolist()


@pytest.mark.parametrize(
    ("name", "max_staleness", "expected"),
    [
        ("train_all", 0, [1, 1, 0, 1, 1, 0, 1]),
        ("mask_older_than", 0, [0, 0, 0, 1, 0, 0, 1]),
        ("mask_older_than", 1, [0, 1, 0, 1, 1, 0, 1]),
        ("fresh_tail_only", 0, [0, 0, 0, 0, 0, 0, 1]),
        ("drop_if_older_than", 1, [0, 0, 0, 0, 0, 0, 0]),
        ("drop_if_older_than", 2, [1, 1, 0, 1, 1, 0, 1]),
    ],
)
def test_what_each_policy_trains(name: str, max_staleness: int, expected: list[int]) -> None:
    assert decided(name, [3, 4, -1, 5, 4, -1, 5], 5, max_staleness) == expected


def test_context_is_never_stale() -> None:
    assert decided("drop_if_older_than", [-1, 5, -1], 5) == [0, 1, 0]
    assert decided("fresh_tail_only", [5, -1, 5], 5) == [1, 0, 1]


def test_a_token_of_weights_that_the_trainer_lost_is_not_on_policy() -> None:
    assert decided("fresh_tail_only", [5, 6], 5) == [0, 0]


def test_a_policy_nobody_knows_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'freshest'.*drop_if_older_than.*train_all"):
        make_policy("freshest")
    with pytest.raises(ConfigError, match="max_staleness=-1"):
        make_policy("mask_older_than", -1)


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_is_plain_data_and_says_whether_it_has_a_bound(name: str) -> None:
    made: TokenPolicy = make_policy(name, 2)
    assert pickle.loads(pickle.dumps(made)) == made
    assert made.bounded == (make_policy(name, 3) != made)


@settings(deadline=None)
@given(st.sampled_from(sorted(POLICIES)), st.lists(st.integers(-1, 5)), st.integers(0, 5), st.integers(0, 3))
def test_a_policy_trains_generated_tokens_only_and_leaves_its_view_alone(
    name: str, versions: list[int], trainer_version: int, max_staleness: int
) -> None:
    seen = view(versions, trainer_version)
    keep = make_policy(name, max_staleness).decide(seen)
    assert not (keep & ~seen.generated).any() and len(keep) == len(versions)
    assert seen.generated.tolist() == [version >= 0 for version in versions]


accounts = st.builds(
    lambda trained, dropped: Account(trained + sum(dropped.values()), trained, dropped),
    st.integers(0, 9),
    st.dictionaries(st.sampled_from(DropReason), st.integers(0, 9)),
)


@settings(deadline=None)
@given(st.lists(accounts, max_size=4))
def test_accounts_that_close_add_up_to_one_that_does(parts: list[Account]) -> None:
    total = sum(parts, Account())
    total.check_integrity()
    assert total == sum(parts[::-1], Account()) and total.generated == sum(part.generated for part in parts)
    assert sum(total.metrics().values()) == 2 * total.generated


@settings(deadline=None)
@given(accounts, st.sampled_from(DropReason))
def test_a_discarded_account_closes_and_trains_nothing(account: Account, reason: DropReason) -> None:
    left = account.discarded(reason)
    left.check_integrity()
    assert (left.trained, left.generated) == (0, account.generated)


def test_a_deferred_session_s_cut_calls_are_deferred_and_not_cancelled() -> None:
    account = Account(20, 5, {DropReason.CANCELLED: 9, DropReason.FORCED: 6})
    assert account.discarded(DropReason.DEFERRED).dropped == {DropReason.DEFERRED: 14, DropReason.FORCED: 6}
    assert account.discarded(DropReason.SESSION).dropped[DropReason.CANCELLED] == 9


def test_an_account_that_does_not_close_names_the_difference() -> None:
    with pytest.raises(IntegrityError, match="10 against 9, a difference of -1"):
        Account(10, 6, {DropReason.STALE: 3}).check_integrity()
    with pytest.raises(IntegrityError, match="below zero"):
        Account(0, 1, {DropReason.STALE: -1}).check_integrity()


def test_an_integrity_error_survives_pickling_and_is_an_assertion() -> None:
    error = IntegrityError("law", 3, 5)
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) == "law: 3 against 5, a difference of +2" and isinstance(again, AssertionError)
