"""vLLM's options in verl's `engine_kwargs`, whose names verl takes with `_` and with `-`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KEY = "actor_rollout_ref.rollout.engine_kwargs.vllm"


def given(kwargs: Any, name: str) -> Any:
    """The value of the option `name`, written with `_`, in the node at KEY; None where it is not given."""
    options = kwargs.items() if isinstance(kwargs, Mapping) else ()
    return next((value for key, value in options if str(key).replace("-", "_") == name), None)
