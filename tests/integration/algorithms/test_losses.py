"""Policy losses for stale tokens: on numbers that are worked out by hand, and what holds for any numbers."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

pytestmark = pytest.mark.integration
OWN = ("interpolated", "m2po")
TOKENS = 8  # what verl divides by, in these tests


class Token(NamedTuple):
    version: int
    old: float
    new: float
    advantage: float
    mask: int = 1


class Result(NamedTuple):
    loss: float
    gradient: list[float]
    metrics: dict[str, float]


def loss_of(
    name: str, rows: Sequence[Sequence[Token]], *, proximal: float = 4.0, current: float = 4.25, **sizes: Any
) -> Result:
    """The registered loss of rows of tokens, its gradient by token, and its metrics."""
    import torch
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    from seamless_verl.algorithms import interpolated, m2po
    from seamless_verl.algorithms.loss_call import LossCall, this_call

    assert interpolated and m2po  # their import registers them
    sizes = {"dp_size": 1, "batch_num_tokens": TOKENS, "global_batch_size": 2} | sizes
    clips = {"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": None, "clip_ratio_c": 3.0}
    config = SimpleNamespace(**clips, global_batch_info=sizes, get=lambda key, default=None: clips.get(key, default))
    columns = [torch.tensor([[getattr(token, field) for token in row] for row in rows]) for field in Token._fields]
    versions, old, new, advantages, mask = columns
    new.requires_grad_(True)
    with this_call.during(LossCall(versions, proximal, current)):
        loss, metrics = get_policy_loss_fn(name)(
            old_log_prob=old,
            log_prob=new,
            advantages=advantages,
            response_mask=mask.bool(),
            loss_agg_mode="token-mean",
            config=config,
        )
    loss.backward()
    return Result(loss.item(), new.grad.flatten().tolist(), metrics)


@pytest.mark.parametrize(
    ("token", "by_hand", "gradient"),
    [
        # one version behind, a quarter of an update on: a = 1 / 1.25, and w r = (p / b) (t / p) = t / b
        (Token(3, -1.0, -0.5, 2.0), -2 * math.exp(0.5), -2 * math.exp(0.5)),
        # a = 2 / 2.25, so that r = exp(-2 / 9) = 0.8007 is just inside of the clip, which t / b = exp(-2) is not
        (Token(2, -1.0, -3.0, -1.0), math.exp(-2), math.exp(-2)),
        # w = exp(0.8 * 2) = 4.95 is cut to 2, and r = exp(0.4) = 1.49 clipped to 1.2
        (Token(3, -3.0, -1.0, 1.0), -2 * 1.2, 0.0),
        # of the proximal version: plain PPO, r = exp(0.5) = 1.65 is clipped to 1.2
        (Token(4, -1.0, -0.5, 1.0), -1.2, 0.0),
        # a negative advantage counts three times at most, dual-clip PPO, before the weight of exp(0.8 * -8)
        (Token(4, -3.0, -1.0, -1.0), 3.0, 0.0),
        (Token(-1, -1.0, -0.5, 1.0, mask=0), 0.0, 0.0),
    ],
)
def test_interpolated_by_hand(token: Token, by_hand: float, gradient: float) -> None:
    found = loss_of("interpolated", [[token]])
    assert found.loss * TOKENS == pytest.approx(by_hand, abs=1e-6)
    assert found.gradient[0] * TOKENS == pytest.approx(gradient, abs=1e-6)


def test_before_the_first_optimizer_step_stale_tokens_are_weighed_and_never_clipped() -> None:
    """The trained policy is the proximal one: r = 1, and w = t / b, cut to 2."""
    tokens = [Token(3, -1.0, -0.5, 2.0), Token(0, -1.0, -3.0, -1.0), Token(1, -3.0, -1.0, 1.0)]
    found = loss_of("interpolated", [tokens], current=4.0)
    gradient = [-2 * math.exp(0.5), math.exp(-2), -2.0]
    assert [value * TOKENS for value in found.gradient] == pytest.approx(gradient)
    assert found.metrics["actor/interpolation"] == 1 and found.metrics["actor/pg_clipfrac"] == 0


@pytest.mark.parametrize("current", [4.0, 4.25, 4.75])
def test_tokens_of_the_proximal_version_are_trained_as_plain_ppo_does(current: float) -> None:
    rows = random_rows(seed=1, version=4)
    ours, verls = (loss_of(name, rows, current=current) for name in ("interpolated", "vanilla"))
    assert ours.loss == pytest.approx(verls.loss) and ours.gradient == pytest.approx(verls.gradient)
    assert ours.metrics["actor/interpolation"] == 0 and ours.metrics["actor/behavior_weight"] == 1


def test_the_share_is_between_the_two_policies_and_grows_with_age() -> None:
    import torch

    from seamless_verl.algorithms.interpolated import interpolation
    from seamless_verl.algorithms.loss_call import LossCall

    call = LossCall(torch.tensor([[5, 4, 3, 2, 0, -1]]), 4.0, 4.5)
    assert interpolation(call).tolist() == [pytest.approx([0, 0, 1 / 1.5, 2 / 2.5, 4 / 4.5, 0])]


def test_m2po_by_hand() -> None:
    """Log ratios 0.1, 0.2, 0.3, 0.4 of the trust region: squares with means 0.01, 0.025, 0.047, 0.075 from the least.

    Those away from the behavior policy against the advantage are out of it, however far they are.
    """
    bounded = [Token(3, -1.0, -1.0 + moved, 1.0) for moved in (0.3, 0.1, 0.4, 0.2)]
    free = [Token(3, -1.0, -2.0, 1.0), Token(3, -1.0, -0.5, -1.0)]
    found = loss_of("m2po", [[*bounded, *free]])
    gradient = [0.0, -math.exp(0.1), 0.0, -math.exp(0.2), -math.exp(-1.0), math.exp(0.5)]
    assert [value * TOKENS for value in found.gradient] == pytest.approx(gradient)
    assert found.loss * TOKENS == pytest.approx(sum(gradient))
    assert found.metrics["actor/pg_clipfrac"] == pytest.approx(2 / 6)


def test_m2po_bounds_falling_tokens_of_negative_advantage_too() -> None:
    found = loss_of("m2po", [[Token(3, -1.0, -1.1, -1.0), Token(3, -1.0, -1.5, -1.0)]])
    assert [value * TOKENS for value in found.gradient] == pytest.approx([math.exp(-0.1), 0.0])


@pytest.mark.parametrize("seed", range(20))
def test_m2po_masks_as_little_as_brings_the_second_moment_below_the_bound(seed: int) -> None:
    import torch

    from seamless_verl.algorithms.m2po import kept

    chance = random.Random(seed)
    moved = torch.tensor([[chance.gauss(0, 0.4) for _ in range(30)] for _ in range(4)])
    advantages = torch.tensor([[advantage] * 30 for advantage in (-1.0, 0.0, 1.0, 0.5)])
    mask = torch.tensor([[chance.random() < 0.8 for _ in range(30)] for _ in range(4)])
    keep = kept(moved, advantages, mask, 0.04)
    region = mask & (moved * advantages > 0)
    assert torch.equal(keep & ~region, mask & ~region)
    left, masked = moved[keep & region].square(), moved[mask & ~keep].square()
    assert left.mean() <= 0.04 and masked.min() >= left.max()
    assert torch.cat([left, masked.min()[None]]).mean() > 0.04


def test_m2po_of_equal_tokens_keeps_all_or_none() -> None:
    import torch

    from seamless_verl.algorithms.m2po import kept

    moved = torch.tensor([[0.1, 0.3, 0.3]])
    assert kept(moved, torch.ones(1, 3), torch.ones(1, 3), 0.06).tolist() == [[True, False, False]]
    assert kept(moved, torch.ones(1, 3), torch.ones(1, 3), 0.065).all()
    assert not kept(moved, torch.ones(1, 3), torch.ones(1, 3), 0.001).any()


def test_m2po_near_the_behavior_policy_is_plain_ppo() -> None:
    rows = [[token._replace(new=token.old + 0.1 * (token.new - token.old)) for token in row] for row in random_rows(2)]
    ours, verls = (loss_of(name, rows) for name in ("m2po", "vanilla"))
    assert ours.loss == pytest.approx(verls.loss) and ours.gradient == pytest.approx(verls.gradient)
    assert ours.metrics["actor/pg_clipfrac"] == verls.metrics["actor/pg_clipfrac"] == 0


def random_rows(seed: int, version: int | None = None) -> list[list[Token]]:
    chance = random.Random(seed)

    def token() -> Token:
        old = chance.uniform(-4, -0.5)
        return Token(
            chance.randrange(5) if version is None else version,
            old,
            min(-0.01, old + chance.gauss(0, 0.5)),
            chance.gauss(0, 1),
            int(chance.random() < 0.8),
        )

    return [[token() for _ in range(6)] for _ in range(4)]


@pytest.mark.parametrize("name", OWN)
def test_the_order_of_rows_and_tokens_does_not_matter(name: str) -> None:
    rows = random_rows(seed=3)
    mixed = [row[::-1] for row in rows[2:] + rows[:2]]
    assert loss_of(name, mixed).loss == pytest.approx(loss_of(name, rows).loss, rel=1e-5)


@pytest.mark.parametrize("name", OWN)
def test_what_is_masked_has_no_gradient_and_no_token_is_no_nan(name: str) -> None:
    rows = random_rows(seed=4)
    gradient = loss_of(name, rows).gradient
    flat = [token for row in rows for token in row]
    assert all(value == 0 for value, token in zip(gradient, flat, strict=True) if not token.mask)
    empty = loss_of(name, [[token._replace(mask=0, new=-90.0) for token in row] for row in rows])
    assert empty.loss == 0 and not any(empty.gradient)
    assert all(math.isfinite(value) for value in empty.metrics.values())


@pytest.mark.parametrize("name", OWN)
def test_policies_that_exclude_each_other_are_no_nan(name: str) -> None:
    far = [Token(0, -200.0, -0.01, 1.0), Token(0, -0.01, -200.0, -1.0), Token(0, -200.0, -0.01, -1.0)]
    found = loss_of(name, [far])
    assert all(math.isfinite(value) for value in (found.loss, *found.gradient, *found.metrics.values()))


def test_without_versions_a_loss_says_why() -> None:
    from seamless_verl.algorithms.loss_call import this_call

    with pytest.raises(RuntimeError, match="only trainer mode seamless"):
        this_call()
