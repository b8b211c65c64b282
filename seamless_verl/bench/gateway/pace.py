"""How a stub engine gives its tokens, and what a client asks of it: the same for every arm."""

from __future__ import annotations

import json
from dataclasses import dataclass

VOCABULARY = 128  # bytes that are a character each, and none that ends a turn
MODEL = "nano"
QUESTION = "You are an agent with a shell. List the files that changed since the last release, newest first."


@dataclass(frozen=True)
class Pace:
    """`tokens` in each reply, `per_delta` at a time, `delay_s` seconds apart; 0 is at once."""

    name: str
    tokens: int
    per_delta: int
    delay_s: float


AT_ONCE = Pace("at-once", 16, 16, 0.0)
"""A whole reply in one delta: nothing but the cost of a request is left."""
STEADY = Pace("steady", 32, 1, 0.02)
"""A token every 20 ms, as a model of some billion parameters gives them to each of 32 calls."""
PACES = {pace.name: pace for pace in (AT_ONCE, STEADY)}


@dataclass(frozen=True)
class Shape:
    """What clients do: so many calls at once, streamed or not."""

    concurrent: int
    stream: bool

    @property
    def name(self) -> str:
        return f"{self.concurrent} {'streamed' if self.stream else 'whole'}"


SHAPES = tuple(Shape(concurrent, stream) for concurrent in (1, 32) for stream in (False, True))


def chat(pace: Pace, *, stream: bool) -> bytes:
    """The body of a call, which every arm gets byte for byte."""
    asked = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": pace.tokens}
    return json.dumps(asked | {"stream": stream}).encode()
