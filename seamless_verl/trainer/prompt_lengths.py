"""Counts the prompts that have more tokens than `data.max_prompt_length`, before training begins.

verl 0.9.1 has `data.truncation`, by default `error`, but reads it nowhere. A prompt that is too long loses its
beginning in the agent loop (agent_loop.py `_cap_text_prompt_length`), and only a worker's log has a warning.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)
MAX_SCANNED = 10_000  # prompts of a set; of a longer one they are evenly spread
SCAN_S = 20.0  # for one set, while the run starts up
LIMIT_KEY, FILTER_KEY = "data.max_prompt_length", "data.filter_overlong_prompts"


@dataclass
class PromptLengths:
    """How many prompts were scanned, how many are too long or could not be rendered, and the longest in tokens."""

    scanned: int = 0
    too_long: int = 0
    longest: int = 0
    failed: int = 0
    error: str = ""  # of the first that failed

    def warnings(self, key: str, limit: int) -> list[str]:
        """Warnings for the user about the prompts of the data set under `key`."""
        found, scanned = [], f"{self.scanned} scanned prompts of {key}"
        if self.too_long:
            found.append(
                f"{LIMIT_KEY}={limit}: {self.too_long} of {scanned} have more tokens, up to {self.longest}, and lose "
                f"their beginning. Set {LIMIT_KEY}={self.longest} to keep them whole, or {FILTER_KEY}=True to leave "
                "them out"
            )
        if self.failed:
            found.append(f"{self.failed} of {scanned} cannot be rendered. The first: {self.error}")
        return found


def scan_lengths(
    prompts: Iterable[Any], length: Callable[[Any], int], limit: int, seconds: float = SCAN_S
) -> PromptLengths:
    """Scans as many prompts as it can within `seconds`; `length` is the number of tokens of one."""
    found, until = PromptLengths(), time.monotonic() + seconds
    for prompt in prompts:
        if time.monotonic() > until:
            break
        found.scanned += 1
        try:
            tokens = length(prompt)
        except Exception as problem:  # a chat template may raise anything; the agent loop will raise it again
            found.failed, found.error = found.failed + 1, found.error or f"{type(problem).__name__}: {problem}"
            continue
        found.too_long += tokens > limit
        found.longest = max(found.longest, tokens)
    return found


@dataclass(frozen=True)
class PromptScan:
    """Scans the prompts of one of verl's data sets. It is made before another thread uses the tokenizer."""

    key: str
    prompts: Iterable[Any]
    length: Callable[[Any], int]

    def log_warnings(self, limit: int) -> None:
        """Warns of prompts with more than `limit` tokens; an error of the scan is logged, since it ends no run."""
        try:
            warnings = scan_lengths(self.prompts, self.length, limit).warnings(self.key, limit)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            warnings = [f"the prompts of {self.key} that are too long cannot be counted: {why}"]
        for warning in warnings:
            logger.warning("%s", warning)


def prompt_scans(datasets: dict[str, Any]) -> list[PromptScan]:
    """The scans of verl's data sets, by key. Sets of another class, with images, or filtered by verl have none."""
    from verl.utils.dataset.rl_dataset import RLHFDataset

    return [
        PromptScan(key, prompts_of(dataset), token_counter(dataset))
        for key, dataset in datasets.items()
        if type(dataset) is RLHFDataset and dataset.processor is None and not dataset.filter_overlong_prompts
    ]


def warn_of_long_prompts(scans: Iterable[PromptScan], limit: int) -> None:
    for scan in scans:
        scan.log_warnings(limit)


def prompts_of(dataset: Any) -> Iterable[Any]:
    frame = dataset.dataframe.select_columns([dataset.prompt_key])
    step = -(-len(frame) // MAX_SCANNED)
    rows = frame if step < 2 else frame.select(range(0, len(frame), step))
    return (row[dataset.prompt_key] for row in rows)


def token_counter(dataset: Any) -> Callable[[Any], int]:
    """Counts the tokens of a prompt as verl's own filter does."""
    from verl.utils import normalize_token_ids

    own = ("tokenize", "return_dict", "return_tensors")
    extra = {name: value for name, value in dataset.apply_chat_template_kwargs.items() if name not in own}
    if dataset.tool_schemas is not None:
        extra["tools"] = dataset.tool_schemas
    tokenizer = deepcopy(dataset.tokenizer)  # another thread may use the original

    def length(prompt: Any) -> int:
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, **extra)
        return len(normalize_token_ids(ids))

    return length
