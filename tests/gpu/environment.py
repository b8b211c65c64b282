"""The environment check: versions of the stack, the card, vLLM's compiled kernels, and a matrix product."""

from __future__ import annotations

import importlib
import time
from importlib.metadata import PackageNotFoundError, version

from gpu.place import Place

STACK = ("torch", "vllm", "verl", "ray", "megatron-core", "mbridge", "TransferQueue", "transformers", "tensordict")
BESIDE = ("numpy", "numba", "llvmlite", "pandas", "pyarrow", "pillow", "tensorboard", "triton")  # of gpu.machine.txt
KERNELS = ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch", "vllm.cumem_allocator")
SIZE, REPEATS = 4096, 20


def check(place: Place) -> None:
    place.report("versions", **{name: installed(name) for name in (*STACK, *BESIDE)})
    import torch
    import verl  # noqa: F401
    from megatron.core import parallel_state  # noqa: F401
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: F401

    if not place.cuda:
        return
    for name in KERNELS:
        importlib.import_module(name)
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    place.report("card", name=properties.name, processors=properties.multi_processor_count, free=free, total=total)
    matrix = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
    matrix @ matrix
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(REPEATS):
        matrix @ matrix
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / REPEATS
    place.report("product", tflops=2 * SIZE**3 / seconds / 1e12)


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
