"""The learning rate by the effective sample size of a mini-batch."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.integration


def sums_of(weights: list[float]) -> Any:
    """Of sequences with these importance weights, each of two tokens that have half of it, and one under the mask."""
    import torch

    from seamless_verl.algorithms.ess_scaling import weight_sums

    halves = [math.log(weight) / 2 for weight in weights]
    mask = torch.tensor([[True, True, False]] * len(weights)).reshape(-1, 3)
    return weight_sums(torch.tensor([[half, half, 9.0] for half in halves]).reshape(-1, 3), mask)


@pytest.mark.parametrize(
    ("weights", "ratio"),
    [
        ([1.0, 1.0, 1.0, 3.0], 6**2 / (1 + 1 + 1 + 9) / 4),  # ESS 3 of 4
        ([0.5, 0.5, 0.5], 1.0),  # equal weights, whatever they are: nothing to be cautious of
        ([1.0, 1e-9], 0.5),
        ([7.0], 1.0),
        ([], 1.0),
    ],
)
def test_by_hand(weights: list[float], ratio: float) -> None:
    sums = sums_of(weights)
    assert sums.ess_ratio == pytest.approx(ratio) and sums.lr_scale == pytest.approx(math.sqrt(ratio))


def test_parts_of_a_batch_add_up_in_any_order() -> None:
    from seamless_verl.algorithms.ess_scaling import total

    chance = random.Random(0)
    weights = [math.exp(chance.gauss(0, 2)) for _ in range(12)]
    whole = sums_of(weights)
    parts = [sums_of(weights[8:]), sums_of([]), sums_of(weights[:3]), sums_of(weights[3:8])]
    assert total(parts).ess_ratio == pytest.approx(whole.ess_ratio)
    assert total(parts).sequences == 12 and 1 / 12 < whole.ess_ratio < 1


def test_long_sequences_do_not_overflow_and_masked_ones_do_not_count() -> None:
    import torch

    from seamless_verl.algorithms.ess_scaling import weight_sums

    log_ratios = torch.tensor([[900.0], [900.0], [-900.0], [5.0]])
    sums = weight_sums(log_ratios, torch.tensor([[1], [1], [1], [0]]))
    assert sums.sequences == 3 and sums.ess_ratio == pytest.approx(2 / 3)


def test_an_update_counts_its_optimizer_steps_and_scales_each() -> None:
    """A worker with a real optimizer, whose weight is the logprob of the second of two sequences."""
    import torch
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils import losses

    from seamless_verl.algorithms.loss_call import this_call
    from seamless_verl.config.schema import CorrectionConfig
    from seamless_verl.trainer.losses import UPDATE, CorrectedUpdates, update_numbers

    weight = torch.nn.Parameter(torch.tensor(-1.0 + math.log(3)))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    versions, seen = torch.tensor([[0], [1]]), list[tuple[float, float]]()

    def policy_loss(*, log_prob: Any, **_: Any) -> Any:
        call = this_call()
        seen.append((call.proximal, call.current))
        assert call.versions.tolist() == [[0], [1]]
        return log_prob[1, 0] * 0.0, {}

    def loss(model_output: Any, data: Any, dp_group: Any) -> Any:
        log_prob = torch.stack([torch.tensor([-1.0]), weight[None]])
        given = {"old_log_prob": torch.full((2, 1), -2.0), "response_mask": torch.ones(2, 1)}
        return losses.get_policy_loss_fn("m2po")(log_prob=log_prob, **given)

    rates = list[float]()
    engine = SimpleNamespace(optimizer=optimizer, get_data_parallel_size=lambda: 1, get_data_parallel_rank=lambda: 0)
    engine.is_mp_src_rank_with_outputs = lambda: True
    engine.optimizer_step = lambda: rates.append(optimizer.param_groups[0]["lr"])
    sampled = torch.full((2, 1), -1.0)  # by the engine; with a proximal policy of its own PPO's old ones are others
    columns = {"weight_version": versions, "rollout_log_probs": sampled}
    batch = tu.get_tensordict(columns, {"mini_batch_size": 1, "epochs": 2})
    tu.assign_non_tensor(batch, **{UPDATE: update_numbers(CorrectionConfig(scale_lr=True), 3, update=1, updates=2)})

    def train_batch(data: Any) -> dict[str, Any]:
        corrected(model_output={}, data=data)
        engine.optimizer_step()
        return {"metrics": {}}

    engine.train_batch = train_batch
    worker = SimpleNamespace(engine=engine)
    worker.train_mini_batch = lambda data: [engine.train_batch(data) for _ in range(4)]
    updates = CorrectedUpdates(worker)
    before = losses.get_policy_loss_fn
    losses.get_policy_loss_fn = lambda name: policy_loss
    try:
        corrected = updates.correcting(loss)
        outputs = worker.train_mini_batch(batch)
    finally:
        losses.get_policy_loss_fn = before
    assert seen == [(2.5, 2.5 + share / 8) for share in range(4)]  # half of a version in four optimizer steps
    ratio = (1 + 3) ** 2 / (1 + 9) / 2
    assert rates == [pytest.approx(math.sqrt(ratio))] * 4 and optimizer.param_groups[0]["lr"] == 1.0
    assert [output["metrics"]["ess_ratio"] for output in outputs] == [[pytest.approx(ratio)]] * 4


def test_versions_are_padded_and_cut_to_the_responses() -> None:
    import torch

    from seamless_verl.trainer.losses import padded

    nested = torch.nested.as_nested_tensor([torch.tensor([3, 4]), torch.tensor([1, 1, 1, 1])], layout=torch.jagged)
    assert padded(nested, torch.zeros(2, 3, dtype=torch.int64), -1).tolist() == [[3, 4, -1], [1, 1, 1]]
