"""Prints the logprobs that a vLLM engine gives to fixed tokens: `logprobs.py MODEL`. One JSON list a prompt."""

from __future__ import annotations

import json
import random
import sys

PROMPTS, LENGTH, FIRST, LAST = 8, 96, 10, 250


def main(model: str) -> None:
    import torch
    import vllm
    from vllm import LLM, SamplingParams

    draw = random.Random(7)
    prompts = [[draw.randrange(FIRST, LAST) for _ in range(LENGTH)] for _ in range(PROMPTS)]
    sys.stdout.write(f"VERSIONS torch {torch.__version__}, vllm {vllm.__version__}\n")
    llm = LLM(model, dtype="float32", enforce_eager=True, max_model_len=128, kv_cache_memory_bytes=64 << 20)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, logprobs=0, detokenize=False)
    for output in llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False):
        rows = [
            entry[token].logprob
            for token, entry in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
            if entry
        ]
        first = output.outputs[0]
        sampled = first.logprobs[0][first.token_ids[0]].logprob
        sys.stdout.write(f"LOGPROBS {json.dumps([*rows, sampled])}\n")


if __name__ == "__main__":
    main(sys.argv[1])
