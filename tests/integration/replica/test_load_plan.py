"""A recorded load plan gives the same parameters as the model's loaders, or there is no plan."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from seamless_verl.replica.load_plan import PlanCache

pytestmark = pytest.mark.integration
Weights = list[tuple[str, torch.Tensor]]


class Fused(torch.nn.Module):
    """Two weights in one parameter with a row of padding, one in another dtype, one transposed and only in part."""

    def __init__(self) -> None:
        super().__init__()
        self.both = torch.nn.Parameter(torch.full((5, 3), 9.0))
        self.low_precision = torch.nn.Parameter(torch.full((3,), 9.0, dtype=torch.bfloat16))
        self.register_buffer("transposed", torch.full((2, 4), 9.0))

    def load(self, weights: Weights) -> None:
        places: dict[str, Callable[[torch.Tensor], object]] = {
            "first": lambda weight: self.both.data.narrow(0, 0, 2).copy_(weight),
            "second": lambda weight: self.both.data[2:4].copy_(weight),
            "half": lambda weight: self.low_precision.data.copy_(weight),
            "transposed": lambda weight: self.transposed.copy_(weight[:, 1:].t()),
        }
        for name, weight in weights:
            places[name](weight)
        self.both.data[4:].fill_(0)
        self.both.data[5:].fill_(7)  # nothing

    def state(self) -> list[torch.Tensor]:
        return [self.both.data, self.low_precision.data, self.transposed]


def random_weights(seed: int) -> Weights:
    """Views of one memory, as they are where weights are staged."""
    memory = torch.randn(100, generator=torch.Generator().manual_seed(seed))
    shapes = {"first": (2, 3), "second": (2, 3), "half": (3,), "transposed": (4, 3)}
    offsets = zip(shapes.items(), range(0, 100, 20), strict=False)
    return [(name, memory[offset:][: torch.Size(shape).numel()].view(shape)) for (name, shape), offset in offsets]


def load_as_worker(model: Fused, cache: PlanCache, weights: Weights, bucket: int) -> bool:
    """Loads as a worker does; whether by the plan."""
    if cache.load(weights, [model]):
        return True
    with cache.recording([model]) as next_bucket:
        for begin in range(0, len(weights), bucket):
            next_bucket(weights[begin : begin + bucket])
            model.load(weights[begin : begin + bucket])
    return False


@pytest.mark.parametrize("bucket", [1, 3, 4])
def test_a_plan_does_what_the_loaders_do(bucket: int) -> None:
    planned, expected, cache = Fused(), Fused(), PlanCache()
    by_plan = []
    for seed in range(3):
        weights = random_weights(seed)
        by_plan.append(load_as_worker(planned, cache, weights, bucket))
        expected.load(weights)
        for found, wanted in zip(planned.state(), expected.state(), strict=True):
            assert torch.equal(found, wanted)
    assert by_plan == [False, True, True]


MORE: dict[str, Callable[..., object]] = {
    "in place": lambda model, *_: model.both.data.mul_(2),
    "out": lambda model, *_: torch.add(model.both.data, 1, out=model.both.data),
    "foreach": lambda model, *_: torch._foreach_mul_([model.both.data], 2),
    "computed": lambda model, *_: model.low_precision.data.copy_(torch.zeros(3)),
    "replaced": lambda model, *_: setattr(model, "both", torch.nn.Parameter(model.both * 2)),
    "sum": lambda model, first, *_: model.both.data.fill_(first.sum().item()),
    "value": lambda model, first, *_: model.both.data.fill_(first[0, 0].item()),
    "value of a parameter": lambda model, *_: model.transposed.fill_(model.both.max().item()),
    "branch": lambda model, first, *_: model.both.data.fill_(bool((first > 0).any())),
    "source changed": lambda model, first, *_: model.both.data[:2].copy_(first.add_(1)),
    "copied beside": lambda model, first, *_: setattr(model, "beside", torch.empty(2, 3).copy_(first)),
    "cloned beside": lambda model, first, *_: setattr(model, "beside", first.clone()),
}


@pytest.mark.parametrize("more", MORE.values(), ids=MORE.keys())
def test_a_load_that_does_more_than_copies_has_no_plan(more: Callable[..., object]) -> None:
    model, cache = Fused(), PlanCache()
    with cache.recording([model]) as next_bucket, torch.no_grad():
        next_bucket(weights := random_weights(0))
        model.load(weights)
        more(model, *(weight for _, weight in weights))
    assert cache.attempted and cache.plan is None
    assert not cache.load(random_weights(1), [model])


def test_a_plan_is_dropped_when_the_model_or_the_weights_changed() -> None:
    for other, model in ((random_weights(1)[:3], None), (random_weights(1), Fused())):
        first, cache = Fused(), PlanCache()
        load_as_worker(first, cache, random_weights(0), 4)
        assert cache.plan is not None
        before = [tensor.clone() for tensor in first.state()]
        assert not cache.load(other, [model or first]) and cache.plan is None
        for tensor, was in zip(first.state(), before, strict=True):
            assert torch.equal(tensor, was)
