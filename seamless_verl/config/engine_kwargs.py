"""vLLM's options in verl's `engine_kwargs`, whose names verl takes with `_` and with `-`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from seamless_verl.config.settings import Settings

KEY = "actor_rollout_ref.rollout.engine_kwargs.vllm"


def given(kwargs: Any, name: str) -> Any:
    """The value of the option `name`, written with `_`, in the node at KEY; None where it is not given."""
    options = kwargs.items() if isinstance(kwargs, Mapping) else ()
    return next((value for key, value in options if str(key).replace("-", "_") == name), None)


def engines_parser(settings: Settings) -> str | None:
    """The reasoning parser of the engines' own options, from either of its two places."""
    kwargs = settings.get(KEY)
    chosen = [given(node, "reasoning_parser") for node in (kwargs, given(kwargs, "structured_outputs_config"))]
    return next((str(parser) for parser in chosen if parser), None)


def option_of(name: str, options: Sequence[str]) -> str | None:
    """The last value of an option of `vllm serve`, written behind `=` or as the next item."""
    value = None
    for option, following in zip_longest(options, options[1:]):
        if option.partition("=")[0].replace("_", "-") == name:
            value = option.partition("=")[2] if "=" in option else following
    return value
