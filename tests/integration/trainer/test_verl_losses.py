"""verl's policy losses in the trainer's workers: their formulas by hand, with our columns beside them.

They are called as the workers call them: through what gives them the versions of tokens, scales the learning rate and
weighs sessions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from seamless_verl.trajectory.policies import make_policy

pytestmark = pytest.mark.integration
LOSSES = ("cispo", "dppo_kl", "dppo_tv", "geo_mean", "gspo", "sapo")
OF_SEQUENCES = ("geo_mean", "gspo")
"""Their ratio is of a whole sequence, not of a token."""
TRAINER_VERSION = 3


class Row(NamedTuple):
    """A training sequence: logprobs then and now, the versions of its tokens, its advantage, and its session's key."""

    key: str
    old: list[float]
    new: list[float]
    versions: list[int]
    advantage: float = 2.0


class Result(NamedTuple):
    loss: float
    gradient: list[list[float]]
    metrics: dict[str, Any]


def trained(name: str, rows: Sequence[Row], *, policy: str = "train_all", scale_lr: bool = False) -> Result:
    """verl's `ppo_loss` of one micro-batch of these rows, in a worker of ours; the gradient by logprob."""
    import torch
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.losses import ppo_loss

    from seamless_verl.config.schema import CorrectionConfig
    from seamless_verl.trainer.losses import UPDATE, WEIGHT, update_numbers
    from seamless_verl.trainer.session_weight import row_weights
    from seamless_verl.trainer.token_mask import masks

    def nested(values: Sequence[Any], dtype: Any = torch.float32) -> Any:
        return torch.nested.as_nested_tensor([torch.as_tensor(row, dtype=dtype) for row in values], layout=torch.jagged)

    given = [(torch.tensor(row.versions), torch.tensor([int(v >= 0) for v in row.versions])) for row in rows]
    mask = masks(given, make_policy(policy, 1), TRAINER_VERSION)
    counted = [int(row.sum()) for row in mask]
    columns = {
        "prompts": nested([[1]] * len(rows), torch.int64),
        "responses": nested([row.versions for row in rows], torch.int64),
        "response_mask": nested(mask, torch.int64),
        "old_log_probs": nested([row.old for row in rows]),
        "rollout_log_probs": nested([row.old for row in rows]),
        "advantages": nested([[row.advantage] * len(row.old) for row in rows]),
        "weight_version": nested([row.versions for row in rows], torch.int64),
        WEIGHT: torch.tensor(row_weights([row.key for row in rows], counted))[:, None],
    }
    sizes = {"dp_size": 1, "batch_num_tokens": sum(counted), "global_batch_size": len({row.key[:3] for row in rows})}
    data = tu.get_tensordict(columns, sizes | {"mini_batch_size": len(rows), "epochs": 1})
    tu.assign_non_tensor(data, **{UPDATE: update_numbers(CorrectionConfig(scale_lr=scale_lr), 4, update=0, updates=1)})
    now = [torch.tensor(row.new, requires_grad=True) for row in rows]
    found = list[tuple[Any, Any]]()

    def compute(loss: Any) -> None:
        output = {"log_probs": nested([torch.cat([row, torch.zeros(1)]) for row in now])}
        found.append(loss(model_output=output, data=data))

    in_worker(compute, lambda **arguments: ppo_loss(config_of(name), **arguments), data)
    ((loss, metrics),) = found
    loss.backward()
    return Result(float(loss), [row.grad.tolist() for row in now], metrics)


def in_worker(compute: Any, loss: Any, data: Any) -> None:
    """Calls `compute` with the loss function that a worker of ours has, within an update of one optimizer step."""
    from seamless_verl.trainer.losses import CorrectedUpdates, weighs_sessions

    engine = SimpleNamespace(get_data_parallel_size=lambda: 1, get_data_parallel_rank=lambda: 0)
    engine.optimizer_step, engine.is_mp_src_rank_with_outputs = lambda: None, lambda: True
    engine.train_batch = lambda data: compute(wrapped) or {"metrics": {}}
    worker = SimpleNamespace(engine=engine, train_mini_batch=lambda data: engine.train_batch(data))
    wrapped = weighs_sessions(CorrectedUpdates(worker).correcting(loss))
    worker.train_mini_batch(data)


def config_of(name: str) -> Any:
    from verl.workers.config import McoreActorConfig

    return McoreActorConfig(
        strategy="megatron",
        ppo_mini_batch_size=2,
        ppo_micro_batch_size_per_gpu=1,
        rollout_n=1,
        loss_agg_mode="seq-mean-token-mean",
        policy_loss={"loss_mode": name},
    )


INSIDE = Row("u_0_0", [-1.0], [-0.9], [3])  # a ratio of exp(0.1) = 1.105, which no clip of 0.2 meets
OUTSIDE = Row("u_0_0", [-1.0], [-0.5], [3])  # exp(0.5) = 1.649; the probability rises from 0.368 to 0.607


def sapo_slope(moved: float) -> float:
    """-A times the derivative by the logprob of 4 sigmoid(r - 1), SAPO's gate with a temperature of 1."""
    ratio = math.exp(moved)
    gate = 1 / (1 + math.exp(1 - ratio))
    return -2 * 4 * gate * (1 - gate) * ratio


@pytest.mark.parametrize(
    ("name", "loss", "inside", "outside"),
    [
        ("cispo", 2 * math.exp(0.1) * 0.9, -2 * math.exp(0.1), -2 * 1.2),  # the weight is cut, the gradient is not
        ("gspo", -2 * math.exp(0.1), -2 * math.exp(0.1), 0.0),
        ("geo_mean", -2 * math.exp(0.1), -2 * math.exp(0.1), 0.0),  # log ratios are cut at 0.2
        ("dppo_tv", 2 * math.exp(0.1) * 0.9, -2 * math.exp(0.1), 0.0),  # the probability rose by 0.239
        ("sapo", -2 * 4 / (1 + math.exp(1 - math.exp(0.1))), sapo_slope(0.1), sapo_slope(0.5)),
    ],
)
def test_the_formula_by_hand(name: str, loss: float, inside: float, outside: float) -> None:
    found = trained(name, [INSIDE])
    assert found.loss == pytest.approx(loss, rel=1e-5)
    assert found.gradient == [[pytest.approx(inside, rel=1e-5)]]
    assert trained(name, [OUTSIDE]).gradient == [[pytest.approx(outside, rel=1e-5)]]


def test_dppo_by_kl_masks_by_the_divergence_of_the_sampled_token() -> None:
    """KL of two outcomes, the token and all others: 0.002, then 0.117 for a probability from 0.607 down to 0.368."""
    inside, near, far = ([Row("u_0_0", [-0.5], [new], [3], advantage=-2.0)] for new in (-0.55, -1.0, -2.0))
    assert trained("dppo_kl", inside).gradient[0][0] == pytest.approx(2 * math.exp(-0.05), rel=1e-5)
    assert trained("dppo_kl", near).gradient[0][0] == pytest.approx(2 * math.exp(-0.5), rel=1e-5)
    assert trained("dppo_kl", far).gradient == [[0.0]], "0.600 is more than 0.2"


LONG = Row("u_0_0", [-1.0, -2.0, -0.5], [-0.95, -2.1, -0.45], [3, 1, 3])


@pytest.mark.parametrize("name", LOSSES)
def test_a_token_that_is_masked_by_its_version_has_no_part_in_the_loss(name: str) -> None:
    found = trained(name, [LONG], policy="mask_older_than")
    assert found.gradient[0][1] == 0 and found.gradient[0][0] != 0 != found.gradient[0][2]
    moved = trained(name, [LONG._replace(new=[-0.95, -7.0, -0.45])], policy="mask_older_than")
    assert moved.loss == pytest.approx(found.loss) and moved.gradient == found.gradient
    everything = trained(name, [LONG])
    assert everything.gradient[0][1] != 0 and everything.loss != pytest.approx(found.loss, rel=1e-3)


@pytest.mark.parametrize("name", LOSSES)
def test_a_sequence_that_is_masked_whole_is_no_nan(name: str) -> None:
    old = Row("v_0_0", [-1.0, -2.0], [-0.9, -2.2], [1, 1])
    found = trained(name, [LONG, old], policy="mask_older_than")
    assert math.isfinite(found.loss) and found.gradient[1] == [0.0, 0.0] and any(found.gradient[0])


@pytest.mark.parametrize("name", LOSSES)
def test_the_scaled_learning_rate_leaves_the_loss_as_it_is(name: str) -> None:
    rows = [LONG, Row("v_0_0", [-1.0, -2.0], [-0.9, -2.2], [2, 2], advantage=-1.0)]
    plain, scaled = trained(name, rows), trained(name, rows, scale_lr=True)
    assert scaled.loss == plain.loss and scaled.gradient == plain.gradient


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in OF_SEQUENCES])
def test_a_session_of_two_rows_weighs_once(name: str) -> None:
    halves = [Row("u_0_0", [-1.0], [-0.95], [3]), Row("u_0_1", [-0.5], [-0.45], [3])]
    other = Row("v_0_0", [-1.5], [-1.4], [3], advantage=-1.0)
    whole = Row("u_0_0", [-1.0, -0.5], [-0.95, -0.45], [3, 3])
    assert trained(name, [*halves, other]).loss == pytest.approx(trained(name, [whole, other]).loss, rel=1e-5)


def test_gmpo_takes_the_mean_of_rows_by_itself() -> None:
    """verl's `geo_mean` ignores `loss_agg_mode` and the weights of rows: docs/algorithms.md says so."""
    halves = [Row("u_0_0", [-1.0], [-0.95], [3]), Row("u_0_1", [-0.5], [-0.45], [3])]
    other = Row("v_0_0", [-1.5], [-1.4], [3], advantage=-1.0)
    by_hand = (-2 * math.exp(0.05) - 2 * math.exp(0.05) + math.exp(0.1)) / 3
    assert trained("geo_mean", [*halves, other]).loss == pytest.approx(by_hand, rel=1e-5)


def test_a_call_within_the_forward_pass_reaches_verls_loss_as_it_is() -> None:
    """verl's engines call the same function with the student's logits, for the teacher's most likely tokens."""
    from verl.utils import tensordict_utils as tu

    from seamless_verl.trainer.finite_updates import around_loss

    seen = list[dict[str, Any]]()
    data = tu.get_tensordict({"a": [1]}, {"mini_batch_size": 1, "epochs": 1})

    def loss(**given: Any) -> str:
        seen.append(given)
        return "of logits"

    def compute(wrapped: Any) -> None:
        checked = around_loss(wrapped, lambda *given: pytest.fail(f"{given} has no model output"))
        assert checked(student_logits="logits", data=data, data_format="thd") == "of logits"

    in_worker(compute, loss, data)
    assert seen == [{"student_logits": "logits", "data": data, "data_format": "thd"}]
