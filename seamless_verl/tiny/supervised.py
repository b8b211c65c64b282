"""Supervised training of a tiny model on questions and answers: the warm starts of the recipes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen3ForCausalLM

from seamless_verl.tiny.files import replaced_folder

RATE, WARM_UP, DECAY = 4e-3, 30, 0.3  # learning rate, the steps until it is reached, the share in which it falls
IGNORED = -100  # the label of a token that is not learned

Example: TypeAlias = tuple[list[int], list[int]]
"""Token ids of a question as the rollout renders it, and of its answer with the end."""


def retrain(folder: Path, seed: int, train: Callable[[Any, PreTrainedTokenizerBase], None]) -> None:
    """Trains the model in `folder` by `train(model, tokenizer)` on one core, and replaces it by the result.

    The same arguments give the same weights on the same machine.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = Qwen3ForCausalLM.from_pretrained(folder)
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    train(model, tokenizer)
    with replaced_folder(folder, marker="config.json") as place:
        model.save_pretrained(place)
        tokenizer.save_pretrained(place)


def train_on(model: Any, batches: Iterator[Sequence[Example]], steps: int) -> None:
    """`steps` updates of AdamW, a batch each; the rate falls at the end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98))
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / WARM_UP, (steps - step) / (steps * DECAY))
        ids, labels = padded(next(batches))
        model(input_ids=ids, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def example(tokenizer: Any, question: str, answer: str) -> Example:
    """A question and an answer to it."""
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer.encode(answer, add_special_tokens=False)
    return tokenizer.encode(text, add_special_tokens=False), [*ids, tokenizer.eos_token_id]


def length(found: Example) -> int:
    """In tokens."""
    return len(found[0]) + len(found[1])


def padded(batch: Sequence[Example]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels [examples, longest], both int64; only answers and their ends are learned."""
    longest = max(map(length, batch))
    rest = [longest - length(one) for one in batch]
    ids = [question + answer + [0] * free for (question, answer), free in zip(batch, rest, strict=True)]
    labels = [
        [IGNORED] * len(question) + answer + [IGNORED] * free
        for (question, answer), free in zip(batch, rest, strict=True)
    ]
    return torch.tensor(ids), torch.tensor(labels)
