"""Which columns of a batch the workers that train get: not those that only describe a prompt or a session.

A worker gets every column of the queue that the batch names, and a column of objects costs it more than one of tensors,
while its device waits. Only columns that verl's agent loops and data sets are known to write are left out: any other
may be meant for a loss or an engine of a user's own. So may `data_source` and `index`, which stay too.
"""

from __future__ import annotations

from collections.abc import Sequence

PROMPT = ("raw_prompt", "reward_model", "extra_info", "agent_name")
PROMPT_OF_TOOLS = ("tools_kwargs", "interaction_kwargs", "ability", "dummy_tensor")
SESSION = ("session_id", "num_turns", "metrics", "extra_fields", "mm_processor_kwargs", "mm_processor_output")
UNTRAINED = frozenset((*PROMPT, *PROMPT_OF_TOOLS, *SESSION))


def trained_columns(names: Sequence[str] | None) -> list[str] | None:
    """These columns without those that no update reads; None, all of them, stays None."""
    return None if names is None else [name for name in names if name not in UNTRAINED]
