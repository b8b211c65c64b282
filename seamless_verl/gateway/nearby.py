"""Short work stays in the event loop's thread.

vLLM renders and tokenizes in a thread of its own, so that a long prompt holds nobody up. Handing a short one over
costs more than the work, for both threads and the interpreter lock between them; so that only long ones go there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from vllm.renderers import hf
from vllm.renderers.base import BaseRenderer

SHORT = 4096  # characters: a millisecond's work


def is_short(value: Any) -> bool:
    """Whether all text in a JSON value together is short."""
    return _left(value, SHORT) >= 0


def stay_here(renderer: BaseRenderer) -> None:
    """Has a renderer do short work at once."""
    tokenize = renderer._tokenize_prompt
    renderer._tokenize_prompt_async = _nearby(tokenize, renderer._tokenize_prompt_async)
    if isinstance(renderer, hf.HfRenderer):
        template = hf.safe_apply_chat_template
        renderer._apply_chat_template_async = _nearby(template, renderer._apply_chat_template_async)


def _nearby(work: Callable[..., Any], elsewhere: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def wherever(*args: Any, **options: Any) -> Any:
        if is_short(args) and is_short(options):
            return work(*args, **options)
        return await elsewhere(*args, **options)

    return wherever


def _left(value: Any, room: int) -> int:
    """What is left of the room, in characters; anything below 0 when it does not suffice."""
    if isinstance(value, str):
        return room - len(value)
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return room
    for part in value:
        room = _left(part, room - 1)
        if room < 0:
            break
    return room
