"""Which rows of a checkpoint's queue are prompts to be submitted again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transfer_queue as tq

from seamless_verl.agent_loops.rows import prompt_of


def without_trained(tags: Mapping[str, Mapping[str, Any]], partition_id: str) -> dict[str, Mapping[str, Any]]:
    """The queue's rows without those that a checkpoint has of its last step, which are cleared.

    verl saves before it clears a step's rows, whose prompts are gone by then; each resume would keep them for ever.
    """
    prompts = {key for key, tag in tags.items() if tag.get("is_prompt")}
    kept = {key: tag for key, tag in tags.items() if key in prompts or prompt_of(key) in prompts}
    if trained := list(tags.keys() - kept.keys()):
        tq.kv_clear(keys=trained, partition_id=partition_id)
    return kept
