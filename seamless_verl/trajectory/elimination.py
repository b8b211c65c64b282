"""Names what is likely at fault where two logprobs of the same tokens differ, by what their differences have in common.

Both are of one sample's tokens, in order, by the weights of one version. What none of the forms fits is left to who
differs: one replica, or all.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Logprobs: TypeAlias = NDArray[np.float32]
SHIFTS = (1, -1, 2, -2)  # tokens
FEWEST = 8  # tokens that show a form
UNSURE = -0.1  # nats: of a likelier token hardly any fault changes the logprob
CLOSE = 0.25  # of the mean difference: what is left of it when its form is taken out
COLDEST, HOTTEST = 0.2, 5.0  # times the temperature of training, which is looked for
READINGS, SAME = 8, 0.005


class Form(StrEnum):
    """How the differences of a sample's tokens hang together, and what `Found.number` is."""

    SHIFTED = "shifted"
    """One has the other's logprobs so many tokens later."""
    SCALED = "scaled"
    """One is the other at this times its temperature."""
    LATER = "later"
    """They agree up to this token, counted from 0."""
    FEW = "few"
    """They agree but for single tokens; the first of them."""
    ALL = "all"
    """None of these."""


class Found(NamedTuple):
    form: Form
    number: float = 0.0


OF_ENGINE = {
    Form.SHIFTED: "The trainer's logprobs are those of tokens {0:+.0f} places on: positions or labels are shifted",
    Form.SCALED: "The trainer's are those of about {0:.2f} times the temperature: one side does not apply it",
    Form.LATER: "They agree up to token {0:.0f} of the response: positions, a window or a truncation differ from there",
    Form.FEW: "All but single tokens agree, from token {0:.0f} on: look for a mask or an id that one side alone has",
}
OF_RECORD = {
    Form.SHIFTED: "its record is that of tokens {0:+.0f} places on: logprobs and ids were shifted against each other",
    Form.SCALED: "temperature: its record is that of about {0:.2f} times the temperature with which is trained",
    Form.LATER: "tokens: its record agrees up to token {0:.0f} of the response. From there on the engine was fed other"
    " ids than are trained, as when text was rendered again",
    Form.FEW: "tokens: its record of token {0:.0f} of the response is of another id than is trained, as when text was"
    " rendered again",
}
KV = (
    "KV kept from older weights: the sample has tokens of version {0} behind older ones, and these alone are recorded"
    " otherwise; samples of one version agree"
)
SAMPLING = (
    "the trainer agrees with what the engine reads now: what it recorded while it generated is at fault. Look at"
    " penalties and grammars, at KV kept from older weights, and whether the prompt was rendered again"
)


Read: TypeAlias = Callable[[float], Logprobs | None]
"""The logprobs [N] that the engine gives the tokens at so many times the temperature; None if it cannot read now."""


def form_of(found: Logprobs, other: Logprobs, limit: float, read: Read) -> Found:
    """The form of the differences [N] of tokens, whose mean is not usual above `limit`, in nats; `read` gives `other`
    at another temperature."""
    difference = np.abs(found - other)
    mean, count = float(difference.mean()), len(found)
    far = np.flatnonzero(difference > max(mean, limit))
    if count < FEWEST or not len(far):
        return Found(Form.ALL)
    first, close = int(far[0]), min(limit, CLOSE * mean)
    if len(far) * FEWEST <= count and np.delete(difference, far).mean() <= limit:
        return Found(Form.FEW, first)
    for shift in SHIFTS:
        pair = (found[:-shift], other[shift:]) if shift > 0 else (found[-shift:], other[:shift])
        if len(pair[0]) >= FEWEST and np.abs(pair[0] - pair[1]).mean() <= close:
            return Found(Form.SHIFTED, shift)
    if (other[:first] < UNSURE).sum() >= FEWEST - 2 and difference[:first].mean() <= CLOSE * mean:
        return Found(Form.LATER, first)
    if times := scale_of(found, other, max(limit, CLOSE * mean), read):
        return Found(Form.SCALED, times)
    return Found(Form.ALL)


def scale_of(found: Logprobs, other: Logprobs, close: float, read: Read) -> float | None:
    """At how many times the temperature `read` gives `found`, to a mean difference of `close`; None if at none.

    Follows the secant of the least squares over the inverse temperature.
    """
    before, now, of_before, left = 1.0, 1.1, other, np.inf
    for _ in range(READINGS):
        if (of_now := read(1 / now)) is None:
            return None
        left = float(np.abs(found - of_now).mean())
        slope = (of_now - of_before) / (now - before)
        step = float(((found - of_now) * slope).sum() / max(1e-12, float((slope * slope).sum())))
        before, of_before = now, of_now
        now = min(1 / COLDEST, max(1 / HOTTEST, now + step))
        if abs(now - before) < SAME * before:
            break
    return 1 / before if left <= close else None
