"""Warm start: a short supervised training of a small model on written-out chains, for reinforcement to improve.

No model of this size finds the steps by chance. The answers that it learns from are somebody's who is careless: one in
thirty digits of a sum is a random one. The model learns the steps, and to be as careless: a third of its answers are
right, and one in six of the long ones. The same arguments give the same weights on the same machine.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from sums import ask, careless_answer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen3ForCausalLM

from seamless_verl.tiny.files import replaced_folder

TOKENS, POOL = 4000, 64  # of a batch, padding included; the answers among which a batch finds some of similar length
RATE, WARM_UP, DECAY = 4e-3, 30, 0.3  # learning rate, the steps until it is reached, the share in which it falls
MISTAKES = 0.03  # the share of digits in the warm start's answers that are random ones
IGNORED = -100  # the label of a token that is not learned

Example = tuple[list[int], list[int]]  # token ids of a question, and of its answer with the end


def warm_start(folder: Path, seed: int, steps: int) -> None:
    """Train the model in `folder` for that many steps, and replace it by the result."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = Qwen3ForCausalLM.from_pretrained(folder)
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    train(model, batches(tokenizer, random.Random(f"warm start/{seed}")), steps)
    with replaced_folder(folder, marker="config.json") as place:
        model.save_pretrained(place)
        tokenizer.save_pretrained(place)


def train(model: Any, drawn: Iterator[list[Example]], steps: int) -> None:
    """`steps` updates of AdamW; the rate falls at the end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98))
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / WARM_UP, (steps - step) / (steps * DECAY))
        ids, labels = padded(next(drawn))
        model(input_ids=ids, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def batches(tokenizer: PreTrainedTokenizerBase, draw: random.Random) -> Iterator[list[Example]]:
    """Examples of similar length, as many as TOKENS has room for; a batch begins at any of them, long or short."""
    while True:
        pool = sorted((example(tokenizer, draw) for _ in range(POOL)), key=length)
        first = draw.randrange(POOL)
        last = first + 1
        while last < POOL and (last + 1 - first) * length(pool[last]) < TOKENS:
            last += 1
        yield pool[first:last]


def example(tokenizer: PreTrainedTokenizerBase, draw: random.Random) -> Example:
    """A question as the rollout renders it, and its answer."""
    question = ask(draw)
    messages = [{"role": "user", "content": question.text}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    answer = tokenizer.encode(careless_answer(question, draw, MISTAKES), add_special_tokens=False)
    return tokenizer.encode(text, add_special_tokens=False), [*answer, tokenizer.eos_token_id]


def length(found: Example) -> int:
    """In tokens."""
    return len(found[0]) + len(found[1])


def padded(batch: list[Example]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels [examples, longest]; only answers are learned."""
    longest = max(map(length, batch))
    ids = [question + answer + [0] * (longest - length((question, answer))) for question, answer in batch]
    labels = [
        [IGNORED] * len(question) + answer + [IGNORED] * (longest - length((question, answer)))
        for question, answer in batch
    ]
    return torch.tensor(ids), torch.tensor(labels)
