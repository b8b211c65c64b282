"""Prompts with more tokens than a run has room for, counted before training begins.

verl 0.9.1 has `data.truncation`, by default `error`, and reads it nowhere: a prompt that is too long loses its
beginning in the agent loop (agent_loop.py `_cap_text_prompt_length`), with a warning in the log of a worker.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)
LOOKED_AT = 10_000  # prompts of a set, evenly spread over a longer one
LIMIT, FILTER = "data.max_prompt_length", "data.filter_overlong_prompts"


@dataclass(frozen=True)
class Lengths:
    """Of the prompts that were looked at: how many, how many are too long, and the longest, in tokens.

    `failed` could not be made into tokens; `error` says why the first of them could not.
    """

    looked_at: int = 0
    too_long: int = 0
    longest: int = 0
    failed: int = 0
    error: str = ""


def measured(prompts: Iterable[Any], length: Callable[[Any], int], limit: int) -> Lengths:
    looked_at = too_long = longest = failed = 0
    error = ""
    for prompt in prompts:
        looked_at += 1
        try:
            tokens = length(prompt)
        except Exception as why:  # a chat template raises what it likes; the agent loop that meets it will say more
            failed, error = failed + 1, error or f"{type(why).__name__}: {why}"
            continue
        too_long += tokens > limit
        longest = max(longest, tokens)
    return Lengths(looked_at, too_long, longest, failed, error)


def told(found: Lengths, key: str, limit: int) -> list[str]:
    """What a user should know of the prompts of `key`, a set of data."""
    texts = []
    if found.too_long:
        texts.append(
            f"{LIMIT}={limit}: {found.too_long} of {found.looked_at} prompts of {key} have more tokens, up to "
            f"{found.longest}, and lose their beginning. Set {LIMIT}={found.longest} to keep them whole, or "
            f"{FILTER}=True to leave them out"
        )
    if found.failed:
        texts.append(
            f"{found.failed} of {found.looked_at} prompts of {key} cannot be rendered. The first: {found.error}"
        )
    return texts


def tell_of_long(datasets: dict[str, Any], limit: int) -> None:
    """Warn of prompts in verl's data sets, by their keys, that are longer than `limit` tokens.

    A set of another class, one with images, or one that verl has filtered, is left out.
    """
    from verl.utils.dataset.rl_dataset import RLHFDataset

    for key, dataset in datasets.items():
        if type(dataset) is RLHFDataset and dataset.processor is None and not dataset.filter_overlong_prompts:
            for text in told(measured(prompts_of(dataset), length_by(dataset), limit), key, limit):
                logger.warning(text)


def prompts_of(dataset: Any) -> Iterable[Any]:
    frame = dataset.dataframe.select_columns([dataset.prompt_key])
    step = -(-len(frame) // LOOKED_AT)
    rows = frame if step < 2 else frame.select(range(0, len(frame), step))
    return (row[dataset.prompt_key] for row in rows)


def length_by(dataset: Any) -> Callable[[Any], int]:
    """Tokens of a prompt as verl's own filter counts them."""
    from verl.utils import normalize_token_ids

    ours = ("tokenize", "return_dict", "return_tensors")
    extra = {name: value for name, value in dataset.apply_chat_template_kwargs.items() if name not in ours}
    if dataset.tool_schemas is not None:
        extra["tools"] = dataset.tool_schemas
    tokenizer = deepcopy(dataset.tokenizer)  # others may use it meanwhile, in another thread

    def length(prompt: Any) -> int:
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, **extra)
        return len(normalize_token_ids(ids))

    return length
