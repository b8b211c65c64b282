"""What a session may use, and how its tokens are sampled: parsed once from the JSON of an admin call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from seamless_verl.gateway.refusals import Reason, Refusal

SAMPLED = {
    "temperature": (0.0, None),
    "top_p": (0.0, 1.0),
    "top_k": (-1, None),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, None),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "seed": (None, None),
}
"""The parameters a session can set, with their bounds."""


@dataclass(frozen=True)
class Limits:
    """Bounds of one session; None is no bound. `lifetime` in seconds from its opening.

    `max_tokens` counts generated tokens. Calls that run side by side are each given what is left when they start,
    so together they may pass it by what one of them was given.
    """

    max_turns: int | None = None
    max_tokens: int | None = None
    max_concurrent: int | None = None
    lifetime: float | None = None

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            number = (int, float) if one.name == "lifetime" else int
            if value is not None and (not isinstance(value, number) or isinstance(value, bool) or value <= 0):
                raise _wrong(f"limits.{one.name}", value, "give a number above 0, or leave it out")


@dataclass(frozen=True)
class Sampling:
    """`defaults` hold where an agent says nothing, `overrides` whatever it says; `max_tokens` caps each call."""

    defaults: Mapping[str, float] = field(default_factory=dict)
    overrides: Mapping[str, float] = field(default_factory=dict)
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        for part in ("defaults", "overrides"):
            chosen = getattr(self, part)
            if not isinstance(chosen, Mapping):
                raise _wrong(f"sampling.{part}", chosen, "give an object of parameters")
            for name, value in chosen.items():
                _check(f"sampling.{part}.{name}", name, value)
        cap = self.max_tokens
        if cap is not None and (not isinstance(cap, int) or isinstance(cap, bool) or cap <= 0):
            raise _wrong("sampling.max_tokens", cap, "give a whole number above 0, or leave it out")

    def chosen(self, said: Mapping[str, Any]) -> dict[str, float]:
        """What the session decides for a request whose body says this."""
        return {name: value for name, value in self.defaults.items() if said.get(name) is None} | dict(self.overrides)


_Parsed = TypeVar("_Parsed", Limits, Sampling)


def parse(kind: type[_Parsed], key: str, given: object) -> _Parsed:
    """Limits or Sampling from JSON; raises Refusal naming the key, the value and the way out."""
    if given is None:
        return kind()
    if not isinstance(given, Mapping):
        raise _wrong(key, given, "give an object")
    names = [one.name for one in fields(kind)]
    unknown = [name for name in given if name not in names]
    if unknown:
        raise _wrong(f"{key}.{unknown[0]}", given[unknown[0]], f"there is no such setting; choose from {names}")
    return kind(**given)


def _check(key: str, name: str, value: Any) -> None:
    if name not in SAMPLED:
        raise _wrong(key, value, f"there is no such parameter; choose from {list(SAMPLED)}")
    low, high = SAMPLED[name]
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise _wrong(key, value, "give a number")
    if (low is not None and value < low) or (high is not None and value > high):
        raise _wrong(key, value, f"it lies outside {low} to {high}")


def _wrong(key: str, value: object, way_out: str) -> Refusal:
    return Refusal(Reason.MALFORMED, f"{key}={value!r}: {way_out}", param=key)
