"""Prompts with more tokens than a run has room for, counted before training begins.

verl 0.9.1 has `data.truncation`, by default `error`, and reads it nowhere: a prompt that is too long loses its
beginning in the agent loop (agent_loop.py `_cap_text_prompt_length`), with a warning in the log of a worker.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)
LOOKED_AT = 10_000  # prompts of a set, evenly spread over a longer one
LOOKING_S = 20.0  # at a set, beside what a run does until it begins to train
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


def measured(prompts: Iterable[Any], length: Callable[[Any], int], limit: int, seconds: float = LOOKING_S) -> Lengths:
    """Of as many prompts as can be looked at in so many seconds."""
    looked_at = too_long = longest = failed = 0
    error, until = "", time.monotonic() + seconds
    for prompt in prompts:
        if time.monotonic() > until:
            break
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
            f"{LIMIT}={limit}: {found.too_long} of {found.looked_at} prompts looked at of {key} have more tokens, "
            f"up to {found.longest}, and lose their beginning. Set {LIMIT}={found.longest} to keep these whole, or "
            f"{FILTER}=True to leave such out"
        )
    if found.failed:
        counted = f"{found.failed} of {found.looked_at} prompts looked at of {key}"
        texts.append(f"{counted} cannot be rendered. The first: {found.error}")
    return texts


@dataclass(frozen=True)
class PromptScan:
    """Looks at the prompts of one of verl's data sets; made where the tokenizer is not in use."""

    key: str
    prompts: Iterable[Any]
    length: Callable[[Any], int]

    def tell(self, limit: int) -> None:
        """Warn of prompts that are longer than `limit` tokens; that they cannot be counted ends no run."""
        try:
            texts = told(measured(self.prompts, self.length, limit), self.key, limit)
        except Exception as why:
            texts = [f"how many prompts of {self.key} are too long cannot be said: {type(why).__name__}: {why}"]
        for text in texts:
            logger.warning("%s", text)


def prompt_scans(datasets: dict[str, Any]) -> list[PromptScan]:
    """For verl's data sets by their keys; not for one of another class, with images, or that verl has filtered."""
    from verl.utils.dataset.rl_dataset import RLHFDataset

    return [
        PromptScan(key, prompts_of(dataset), length_by(dataset))
        for key, dataset in datasets.items()
        if type(dataset) is RLHFDataset and dataset.processor is None and not dataset.filter_overlong_prompts
    ]


def tell_of_long(found: Iterable[PromptScan], limit: int) -> None:
    for one in found:
        one.tell(limit)


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
