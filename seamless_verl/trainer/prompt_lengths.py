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


@dataclass(frozen=True)
class PromptScan:
    """Scans the prompts of one of verl's data sets. It is made before another thread uses the tokenizer."""

    key: str
    prompts: Iterable[Any]
    length: Callable[[Any], int]

    def warnings(self, limit: int, seconds: float = SCAN_S) -> list[str]:
        """About prompts with more than `limit` tokens, among as many as are scanned within so many seconds."""
        until, lengths, problems, found = time.monotonic() + seconds, list[int](), list[str](), list[str]()
        for prompt in self.prompts:
            if time.monotonic() > until:
                break
            try:
                lengths.append(self.length(prompt))
            except Exception as problem:  # a chat template may raise anything; the agent loop will raise it again
                problems.append(f"{type(problem).__name__}: {problem}")
        scanned = f"{len(lengths) + len(problems)} scanned prompts of {self.key}"
        if too_long := sum(tokens > limit for tokens in lengths):
            found.append(
                f"{LIMIT_KEY}={limit}: {too_long} of {scanned} have more tokens, up to {max(lengths)}, and lose "
                f"their beginning. Set {LIMIT_KEY}={max(lengths)} to keep them whole, or {FILTER_KEY}=True to leave "
                "them out"
            )
        if problems:
            found.append(f"{len(problems)} of {scanned} cannot be rendered. The first: {problems[0]}")
        return found


def prompt_scans(datasets: dict[str, Any]) -> list[PromptScan]:
    """The scans of verl's data sets, by key. Sets of another class, with images, or filtered by verl have none."""
    from verl.utils.dataset.rl_dataset import RLHFDataset

    return [
        PromptScan(key, prompts_of(dataset), token_counter(dataset))
        for key, dataset in datasets.items()
        if type(dataset) is RLHFDataset and dataset.processor is None and not dataset.filter_overlong_prompts
    ]


def warn_of_long_prompts(scans: Iterable[PromptScan], limit: int) -> None:
    """Logs the warnings of each scan, or the error that ended it: no scan ends a run."""
    for scan in scans:
        try:
            warnings = scan.warnings(limit)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            warnings = [f"the prompts of {scan.key} that are too long cannot be counted: {why}"]
        for warning in warnings:
            logger.warning("%s", warning)


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
