"""What renders the prompts of verl's agent loops: one for all loops of a worker, and once for the sessions of a group.

verl makes a loop for each session, and each loop makes a builder of its own, which asks the tokenizer for its special
tokens and then renders a prompt that the group's other sessions have too. Together that was a fifth of a worker's time.
verl's builders have no state but what they are made of. Those that also render images are made as verl makes them.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable
from functools import wraps
from typing import Any

from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from seamless_verl.gateway.prompt_cache import PromptCache, prompt_key


class PromptBuilders:
    """Makes builders as verl's `create_continuous_token_builder` does. Any thread may use what it makes.

    Owned state: the builders by what they are made of, and the prompts that were rendered a moment ago.
    """

    def __init__(self) -> None:
        self._builders: dict[bytes, Any] = {}
        self._rendered, self._lock = PromptCache(), threading.Lock()

    def __call__(self, tokenizer: Any, *, processor: Any = None, **options: Any) -> Any:
        if processor is not None:
            return create_continuous_token_builder(tokenizer, processor=processor, **options)
        key = prompt_key(id(tokenizer), options)
        if (builder := self._builders.get(key)) is None:
            builder = create_continuous_token_builder(tokenizer, **options)
            builder.build_initial_tokens = self._once(key, builder.build_initial_tokens)
            builder.made_of = tokenizer  # which keeps its id
            self._builders[key] = builder
        return builder

    def _once(self, builder: bytes, render: Callable[..., list[int]]) -> Callable[..., list[int]]:
        """Renders equal messages with equal tools once a minute: a template may contain the date."""

        @wraps(render)
        def rendered(messages: Any, *, tools: Any = None, **media: Any) -> list[int]:
            key = prompt_key(builder.hex(), messages, tools)
            with self._lock:
                known = self._rendered.get(key)
            if known is None:
                known = array("i", render(messages, tools=tools, **media))
                with self._lock:
                    self._rendered.put(key, known)
            return list(known)

        return rendered
