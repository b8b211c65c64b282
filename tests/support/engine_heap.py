"""Prints how much an engine's C heap grew over batches of ever new shapes, in MiB: `engine_heap.py MODEL BATCHES`."""

from __future__ import annotations

import ctypes
import os
import random
import sys

WARM_UP = 10  # batches
FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class HeapUse(ctypes.Structure):
    """glibc's `struct mallinfo2`; `uordblks` are the bytes in use."""

    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS.split()]


def main(model: str, batches: int) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine is in this process
    from vllm import LLM, SamplingParams

    heap, draw = ctypes.CDLL("libc.so.6"), random.Random(7)
    heap.mallinfo2.restype = HeapUse
    sizes = {"max_model_len": 256, "max_num_seqs": 16, "kv_cache_memory_bytes": 64 << 20}
    llm = LLM(model, dtype="float32", enforce_eager=True, **sizes)
    before = 0
    for number in range(WARM_UP + batches):
        if number == WARM_UP:
            before = heap.mallinfo2().uordblks
        lengths = [(draw.randint(8, 96), draw.randint(1, 40)) for _ in range(draw.randint(1, 16))]
        prompts = [{"prompt_token_ids": [draw.randrange(10, 250) for _ in range(length)]} for length, _ in lengths]
        sampling = [SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False) for _, tokens in lengths]
        llm.generate(prompts, sampling, use_tqdm=False)
    sys.stdout.write(f"GREW {(heap.mallinfo2().uordblks - before) / 2**20:.1f}\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
