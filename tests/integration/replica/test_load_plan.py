"""A load's copies, noted and done again: the same parameters as the loaders give, or no plan."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from seamless_verl.replica.load_plan import Plans

pytestmark = pytest.mark.integration
Weights = list[tuple[str, torch.Tensor]]


class Fused(torch.nn.Module):
    """Two weights in one parameter with a row of padding, one in another dtype, one transposed and only in part."""

    def __init__(self) -> None:
        super().__init__()
        self.both = torch.nn.Parameter(torch.full((5, 3), 9.0))
        self.brief = torch.nn.Parameter(torch.full((3,), 9.0, dtype=torch.bfloat16))
        self.register_buffer("turned", torch.full((2, 4), 9.0))

    def load(self, weights: Weights) -> None:
        places: dict[str, Callable[[torch.Tensor], object]] = {
            "first": lambda weight: self.both.data.narrow(0, 0, 2).copy_(weight),
            "second": lambda weight: self.both.data[2:4].copy_(weight),
            "half": lambda weight: self.brief.data.copy_(weight),
            "turned": lambda weight: self.turned.copy_(weight[:, 1:].t()),
        }
        for name, weight in weights:
            places[name](weight)
        self.both.data[4:].fill_(0)
        self.both.data[5:].fill_(7)  # nothing

    def state(self) -> list[torch.Tensor]:
        return [self.both.data, self.brief.data, self.turned]


def drawn(seed: int) -> Weights:
    """Views of one memory, as they are where weights are staged."""
    memory = torch.randn(100, generator=torch.Generator().manual_seed(seed))
    shapes = {"first": (2, 3), "second": (2, 3), "half": (3,), "turned": (4, 3)}
    begins = zip(shapes.items(), range(0, 100, 20), strict=False)
    return [(name, memory[begin:][: torch.Size(shape).numel()].view(shape)) for (name, shape), begin in begins]


def loaded(model: Fused, plans: Plans, weights: Weights, bucket: int) -> bool:
    """Load as a worker does; whether it was by the plan."""
    if plans.load(weights, [model]):
        return True
    with plans.noting([model]) as comes:
        for begin in range(0, len(weights), bucket):
            comes(weights[begin : begin + bucket])
            model.load(weights[begin : begin + bucket])
    return False


@pytest.mark.parametrize("bucket", [1, 3, 4])
def test_a_plan_does_what_the_loaders_do(bucket: int) -> None:
    ours, theirs, plans = Fused(), Fused(), Plans()
    by_plan = []
    for seed in range(3):
        weights = drawn(seed)
        by_plan.append(loaded(ours, plans, weights, bucket))
        theirs.load(weights)
        for mine, expected in zip(ours.state(), theirs.state(), strict=True):
            assert torch.equal(mine, expected)
    assert by_plan == [False, True, True]


MORE: dict[str, Callable[..., object]] = {
    "in place": lambda model, *_: model.both.data.mul_(2),
    "out": lambda model, *_: torch.add(model.both.data, 1, out=model.both.data),
    "foreach": lambda model, *_: torch._foreach_mul_([model.both.data], 2),
    "computed": lambda model, *_: model.brief.data.copy_(torch.zeros(3)),
    "replaced": lambda model, *_: setattr(model, "both", torch.nn.Parameter(model.both * 2)),
    "sum": lambda model, first, *_: model.both.data.fill_(first.sum().item()),
    "value": lambda model, first, *_: model.both.data.fill_(first[0, 0].item()),
    "value of a parameter": lambda model, *_: model.turned.fill_(model.both.max().item()),
    "branch": lambda model, first, *_: model.both.data.fill_(bool((first > 0).any())),
    "source changed": lambda model, first, *_: model.both.data[:2].copy_(first.add_(1)),
    "copied beside": lambda model, first, *_: setattr(model, "beside", torch.empty(2, 3).copy_(first)),
    "cloned beside": lambda model, first, *_: setattr(model, "beside", first.clone()),
}


@pytest.mark.parametrize("more", MORE.values(), ids=MORE.keys())
def test_what_is_more_than_copies_has_no_plan(more: Callable[..., object]) -> None:
    model, plans = Fused(), Plans()
    with plans.noting([model]) as comes, torch.no_grad():
        comes(weights := drawn(0))
        model.load(weights)
        more(model, *(weight for _, weight in weights))
    assert plans.tried and plans.plan is None
    assert not plans.load(drawn(1), [model])


def test_a_plan_is_given_up_when_the_model_or_its_weights_are_others() -> None:
    for other, model in ((drawn(1)[:3], None), (drawn(1), Fused())):
        first, plans = Fused(), Plans()
        loaded(first, plans, drawn(0), 4)
        assert plans.plan is not None
        before = [tensor.clone() for tensor in first.state()]
        assert not plans.load(other, [model or first]) and plans.plan is None
        for tensor, was in zip(first.state(), before, strict=True):
            assert torch.equal(tensor, was)
