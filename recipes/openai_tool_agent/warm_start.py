"""Warm start: a short supervised training of a small model on transcripts, good and bad, for reinforcement to improve.

No model of this size finds a tool's syntax by chance. So it is trained on right transcripts first, then on right and
wrong ones in the shares of `Habit`. This takes about a minute on one core; the same arguments give the same weights on
the same machine.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from agent import TOOLS
from transcripts import Habit, ask, transcript
from transformers import PreTrainedTokenizerBase

from seamless_verl.tiny.supervised import IGNORED, Example, retrain

BATCH = 16  # transcripts
RATE, WARM_UP = 4e-3, 20  # learning rate, and the steps until it is reached
RIGHT_SHARE = 0.8  # the share of steps with transcripts of RIGHT only


def warm_start(folder: Path, seed: int, steps: int) -> None:
    """Train the model in `folder` for that many steps, and replace it by the result."""
    draw = random.Random(f"transcripts/{seed}")
    retrain(folder, seed, lambda model, tokenizer: train(model, tokenizer, draw, steps))


def train(model: Any, tokenizer: PreTrainedTokenizerBase, draw: random.Random, steps: int) -> None:
    """`steps` updates of AdamW; the rate falls while wrong habits are mixed in."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    mixed_from = int(steps * RIGHT_SHARE)
    for step in range(steps):
        habits = examples(tokenizer, draw, list(Habit) if step >= mixed_from else [Habit.RIGHT])
        decay = min(1.0, (steps - step) / (steps - mixed_from))
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / WARM_UP) * decay
        loss_of(model, opening(tokenizer), list(islice(habits, BATCH))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def loss_of(model: Any, head: list[int], batch: list[Example]) -> torch.Tensor:
    """Mean cross entropy of the learned tokens; `head`, which all share, is computed once."""
    longest = max(len(ids) for ids, _ in batch)
    ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in batch])
    labels = torch.tensor([labels + [IGNORED] * (longest - len(labels)) for _, labels in batch])
    cache = model(input_ids=torch.tensor([head]), use_cache=True).past_key_values
    cache.batch_repeat_interleave(len(batch))
    loss: torch.Tensor = model(input_ids=ids, labels=labels, past_key_values=cache).loss
    return loss


def examples(tokenizer: PreTrainedTokenizerBase, draw: random.Random, habits: list[Habit]) -> Iterator[Example]:
    """Token ids of transcripts after their common opening, and their labels: the assistant's messages."""
    skipped = len(opening(tokenizer))
    while True:
        [habit] = draw.choices(habits, [habit.value for habit in habits])
        ids = render(tokenizer, transcript(ask(draw), habit, draw))[skipped:]
        yield ids, labels_of(tokenizer, ids)


def labels_of(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    """The ids of each assistant's message and of its end; `IGNORED` elsewhere."""
    assistant, end = tokenizer.convert_tokens_to_ids(["<|assistant|>", "<|im_end|>"])
    labels, speaking = [], False
    for token in ids:
        labels.append(token if speaking else IGNORED)
        speaking = token == assistant or (speaking and token != end)
    return labels


def opening(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What precedes every question: the tools."""
    ids = render(tokenizer, [{"role": "user", "content": ""}])
    return ids[: ids.index(tokenizer.convert_tokens_to_ids("<|im_end|>")) + 1]


def render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]]) -> list[int]:
    """A conversation's ids as the gateway renders it."""
    text = tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False)
    return list(tokenizer.encode(text, add_special_tokens=False))
