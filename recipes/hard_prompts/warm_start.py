"""Warm start: a short supervised training of a small model on sums of all difficulties, for reinforcement to improve.

Without it no prompt is ever right, and there is nothing that tells hard from easy. It ends while easy sums are mostly
right, and hard ones seldom. The same arguments give the same weights on the same machine.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from sums import Question, questions
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen3ForCausalLM

from seamless_verl.tiny.files import replaced_folder

POOL, BATCH = 30_000, 64  # questions that are drawn from, and those of a batch
RATE, WARM_UP, DECAY = 4e-3, 30, 0.3  # learning rate, the steps until it is reached, the share in which it falls
IGNORED = -100  # the label of a token that is not learned


def warm_start(folder: Path, seed: int, steps: int) -> None:
    """Train the model in `folder` for that many steps, and replace it by the result."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = Qwen3ForCausalLM.from_pretrained(folder)
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    train(model, tokenizer, random.Random(f"warm start/{seed}"), questions("warm start", seed, POOL), steps)
    with replaced_folder(folder, marker="config.json") as place:
        model.save_pretrained(place)
        tokenizer.save_pretrained(place)


def train(
    model: Any, tokenizer: PreTrainedTokenizerBase, draw: random.Random, pool: list[Question], steps: int
) -> None:
    """`steps` updates of AdamW on random questions of `pool`; the rate falls at the end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98))
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / WARM_UP, (steps - step) / (steps * DECAY))
        ids, labels = padded(tokenizer, draw.sample(pool, BATCH))
        model(input_ids=ids, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def padded(tokenizer: PreTrainedTokenizerBase, batch: list[Question]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels [questions, longest] of questions as the rollout renders them; only answers are learned."""
    rows = [(prompt_ids(tokenizer, question), answer_ids(tokenizer, question)) for question in batch]
    longest = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = [prompt + answer + [0] * (longest - len(prompt + answer)) for prompt, answer in rows]
    labels = [
        [IGNORED] * len(prompt) + answer + [IGNORED] * (longest - len(prompt + answer)) for prompt, answer in rows
    ]
    return torch.tensor(ids), torch.tensor(labels)


def prompt_ids(tokenizer: PreTrainedTokenizerBase, question: Question) -> list[int]:
    messages = [{"role": "user", "content": question.text}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer.encode(text, add_special_tokens=False))


def answer_ids(tokenizer: PreTrainedTokenizerBase, question: Question) -> list[int]:
    """The answer and its end."""
    return [*tokenizer.encode(question.answer, add_special_tokens=False), int(tokenizer.eos_token_id or 0)]
