"""What renders the prompts of verl's agent loops: made once for all loops of a worker, as are the prompts of a group.

verl makes a builder for each session, which asks the tokenizer for its special tokens and renders a prompt that the
group's other sessions have too: a fifth of a worker's time. A loop gets a copy of one, and may change it; those that
also render images are made as verl makes them.
"""

from __future__ import annotations

import copy
import threading
from array import array
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from omegaconf import OmegaConf
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from seamless_verl.runtime.prompt_cache import PromptCache, strict_prompt_key


class PromptBuilders:
    """Makes builders as verl's `create_continuous_token_builder` does. Any thread may use what it makes.

    Owned state: the builders by what they are made of, and the prompts that are being rendered, or were in the last
    minute: a template may contain the date. What is no JSON is made and rendered each time.
    """

    def __init__(self) -> None:
        self._builders: dict[bytes, Any] = {}
        self._rendering: dict[bytes, Future[array[int]]] = {}
        self._rendered, self._lock = PromptCache(), threading.Lock()

    def __call__(self, tokenizer: Any, *, processor: Any = None, **options: Any) -> Any:
        options = {name: plain(value) for name, value in options.items()}
        key = None if processor is not None else strict_prompt_key(id(tokenizer), options)
        if key is None:
            return create_continuous_token_builder(tokenizer, processor=processor, **options)
        if key not in self._builders:
            self._builders[key] = create_continuous_token_builder(tokenizer, **options)  # keeps the tokenizer's id
        builder = copy.copy(self._builders[key])
        builder.build_initial_tokens = partial(self._initial_tokens, builder)
        return builder

    def _initial_tokens(self, builder: Any, messages: Any, *, tools: Any = None, **media: Any) -> list[int]:
        """The builder's method of that name, without images; equal prompts are rendered once."""
        render = partial(type(builder).build_initial_tokens, builder, messages, tools=tools, **media)
        tokenizer = builder.tokenizer
        made_of = (type(builder).__qualname__, id(tokenizer), getattr(tokenizer, "chat_template", None))
        key = strict_prompt_key(*made_of, plain(builder.chat_template_kwargs), messages, tools)
        return list(render() if key is None else self._once(key, render))

    def _once(self, key: bytes, render: Callable[[], list[int]]) -> array[int]:
        """What was rendered under this key, in this thread or another one."""
        with self._lock:
            if (known := self._rendered.get(key)) is not None:
                return known
            if (open_one := self._rendering.get(key)) is None:
                own = self._rendering[key] = Future()
        if open_one is not None:
            return open_one.result()
        try:
            ids = array("i", render())
        except BaseException as error:
            with self._lock:
                del self._rendering[key]
            own.set_exception(error)
            raise
        with self._lock:
            self._rendered.put(key, ids)
            del self._rendering[key]
        own.set_result(ids)
        return ids


def plain(value: Any) -> Any:
    """A node of a config as plain data; anything else as it is."""
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
