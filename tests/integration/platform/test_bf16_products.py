"""Products of bf16 on the host: the value that instructions for bf16 have, as torch's operators promise it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from seamless_verl.platform.megatron.adapt import SLOW, product

pytestmark = pytest.mark.integration
OPERATORS = torch.ops.aten
SHAPES = {
    "mm": ((5, 7), (7, 3)),
    "bmm": ((2, 5, 7), (2, 7, 3)),
    "addmm": ((3,), (5, 7), (7, 3)),
    "baddbmm": ((2, 5, 3), (2, 5, 7), (2, 7, 3)),
}


def operands(name: str, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(*shape, dtype=torch.float32).to(dtype) for shape in SHAPES[name]]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("scales", [{}, {"beta": 0.5, "alpha": 2}], ids=["plain", "scaled"])
def test_it_is_the_product_in_fp64_rounded_once(name: str, scales: dict[str, float]) -> None:
    scales = scales if "add" in name else {}
    ours = product(getattr(OPERATORS, name).out)
    given = operands(name, torch.bfloat16)
    exact = getattr(torch, name)(*(one.double() for one in given), **scales).to(torch.bfloat16)
    found = ours(*given, **scales)
    assert found.dtype is torch.bfloat16 and found.shape == exact.shape
    torch.testing.assert_close(found, exact, rtol=2**-8, atol=1e-3)  # one rounding to bf16, of sums in fp32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int64])
@pytest.mark.parametrize("name", SHAPES)
def test_other_dtypes_are_torchs_own_products(name: str, dtype: torch.dtype) -> None:
    given = operands(name, dtype)
    assert torch.equal(product(getattr(OPERATORS, name).out)(*given), getattr(torch, name)(*given))


@pytest.mark.parametrize("left, right", [((5, 7), (6, 3)), ((5, 7), (7,))])
def test_shapes_that_do_not_fit_are_refused(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    with pytest.raises((RuntimeError, IndexError), match=r"mat1|2-D|2D|matrix|dimension"):
        product(OPERATORS.mm.out)(torch.zeros(left), torch.zeros(right))


@pytest.mark.parametrize("rows, inner", [(0, 7), (5, 0)])
def test_nothing_is_multiplied_too(rows: int, inner: int) -> None:
    left, right = (torch.zeros(shape, dtype=torch.bfloat16) for shape in ((rows, inner), (inner, 3)))
    found = product(OPERATORS.mm.out)(left, right)
    assert found.shape == (rows, 3) and found.dtype is torch.bfloat16 and not found.any()


def test_what_beta_leaves_out_may_be_anything() -> None:
    """As Megatron's attention adds scores to a buffer that nobody has filled."""
    _, left, right = operands("baddbmm", torch.bfloat16)
    unfilled = torch.full((2, 5, 3), torch.nan, dtype=torch.bfloat16)
    found = product(OPERATORS.baddbmm.out)(unfilled, left, right, beta=0, alpha=2)
    torch.testing.assert_close(found, 2 * (left @ right), rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("other", [0, -1])
def test_a_mixture_of_dtypes_is_refused_as_torch_does(name: str, other: int) -> None:
    given = operands(name, torch.bfloat16)
    given[other] = given[other].float()
    with pytest.raises(RuntimeError, match=r"dtype|scalar type"):
        getattr(torch, name)(*given)
    with pytest.raises(RuntimeError, match=r"dtype|scalar type"):
        product(getattr(OPERATORS, name).out)(*given)


REPLACED = """
import json, sys, warnings
import torch
from seamless_verl.platform.megatron import adapt
warnings.simplefilter("error")  # not of what verl imports
multiply_bf16_in_fp32 = adapt.multiply_bf16_in_fp32
capability, used, product = sys.argv[1], set(), adapt.product
torch.backends.cpu.get_cpu_capability = lambda: capability

def counted(into):
    multiply = product(into)
    return lambda *operands, **scales: (used.add(into.name()), multiply(*operands, **scales))[1]

adapt.product = counted
first, second = multiply_bf16_in_fp32(), multiply_bf16_in_fp32()
torch.manual_seed(0)
x = torch.randn(4, 6, 16, dtype=torch.bfloat16, requires_grad=True)
linear = torch.nn.Linear(16, 8).to(torch.bfloat16)
out = torch.nn.functional.silu(linear(x)) @ linear.weight
out.float().square().sum().backward()
exact = torch.nn.Linear(16, 8)
exact.load_state_dict({k: v.float() for k, v in linear.state_dict().items()})
y = x.detach().float().requires_grad_()
(torch.nn.functional.silu(exact(y)) @ exact.weight).square().sum().backward()
far = lambda a, b: float((a.float() - b).norm() / b.norm())
with torch.inference_mode():
    assert linear(x).dtype is torch.bfloat16
    x[0].unsqueeze(0).bmm(linear.weight.t().unsqueeze(0)).baddbmm(x[:1, :, :8], x[:1, :8, :8].new_ones(1, 8, 8))
print(json.dumps({"used": sorted(used), "same": first is second,
                  "input": far(x.grad, y.grad), "weight": far(linear.weight.grad, exact.weight.grad)}))
"""


@pytest.mark.parametrize("capability", ["AVX2", "AVX512"])
def test_a_layer_learns_alike_with_and_without(capability: str) -> None:
    """In a process of its own, since kernels are replaced for all of it; a warning there is an error."""
    done = subprocess.run(
        [sys.executable, "-c", REPLACED, capability], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["used"] == ([f"aten::{name}.out" for name in sorted(SHAPES)] if capability in SLOW else [])
    assert found["same"]
    assert found["input"] < 0.02 and found["weight"] < 0.02


FASTER = """
import time, torch
from seamless_verl.platform.megatron.adapt import multiply_bf16_in_fp32
torch.set_num_threads(1)
a, b = torch.randn(512, 256, dtype=torch.bfloat16), torch.randn(256, 512, dtype=torch.bfloat16)
def seconds():
    return min(timed() for _ in range(3))
def timed():
    start = time.perf_counter()
    a @ b
    return time.perf_counter() - start
before = seconds()
multiply_bf16_in_fp32()
print(before / seconds())
"""


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() not in SLOW, reason="this processor has bf16 products")
def test_it_is_several_times_as_fast_here() -> None:
    done = subprocess.run([sys.executable, "-c", FASTER], capture_output=True, text=True, check=True, timeout=120)
    assert float(done.stdout) > 3  # 50 times, alone
