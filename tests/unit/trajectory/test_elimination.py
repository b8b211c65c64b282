"""What is at fault is found by the form of the differences: faults of one sample, on models from unsure to sure."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from seamless_verl.trajectory.elimination import Form, form_of

TOKENS, WORDS, LIMIT = 48, 300, 0.02
Array = NDArray[np.float64]


def log_softmax(logits: Array) -> Array:
    return (
        logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True)) - logits.max(-1)[:, None]
    )


class Sample:
    """A model's logits at each token of a sample that it drew; `spread` is from unsure to sure."""

    def __init__(self, seed: int, spread: float) -> None:
        self.random = np.random.default_rng(seed)
        own = self.random.uniform(0.3, 1.5, size=(TOKENS, 1))
        self.logits = self.random.normal(size=(TOKENS, WORDS)) * spread * own
        chances = np.exp(log_softmax(self.logits))
        self.ids = np.array([self.random.choice(WORDS, p=one / one.sum()) for one in chances])

    def logprobs(self, times: float = 1.0, logits: Array | None = None, ids: Array | None = None) -> Array:
        found = log_softmax((self.logits if logits is None else logits) / times)
        return found[np.arange(TOKENS), self.ids if ids is None else ids]

    def disturbed(self) -> Array:
        """As by other weights, or KV of others."""
        return self.logprobs(logits=self.logits + self.random.normal(size=self.logits.shape) * 0.5)


def colder(sample: Sample) -> Array:
    return sample.logprobs(0.6)


def warmer(sample: Sample) -> Array:
    return sample.logprobs(1.7)


def later(sample: Sample) -> Array:
    return np.roll(sample.logprobs(), 1)


def earlier(sample: Sample) -> Array:
    return np.roll(sample.logprobs(), -1)


def from_the_middle(sample: Sample) -> Array:
    return np.where(np.arange(TOKENS) < TOKENS // 2, sample.logprobs(), sample.disturbed())


def of_another_id(sample: Sample) -> Array:
    ids = sample.ids.copy()
    ids[20] = np.abs(sample.logits[20] - sample.logits[20, ids[20]]).argmax()
    return sample.logprobs(ids=ids)


FAULTS: dict[Callable[[Sample], Array], tuple[Form, tuple[float, float]]] = {
    colder: (Form.SCALED, (0.58, 0.62)),
    warmer: (Form.SCALED, (1.65, 1.75)),
    later: (Form.SHIFTED, (-1, -1)),
    earlier: (Form.SHIFTED, (1, 1)),
    from_the_middle: (Form.LATER, (TOKENS // 2, TOKENS // 2 + 6)),
    of_another_id: (Form.FEW, (20, 20)),
    Sample.disturbed: (Form.ALL, (0, 0)),
}


@pytest.mark.parametrize("spread", [0.3, 1, 3, 5])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_known_by_the_form_of_its_differences(fault: Callable[[Sample], Array], spread: float) -> None:
    form, (least, most) = FAULTS[fault]
    for seed in range(20):
        sample = Sample(seed, spread)
        noise = sample.random.normal(size=TOKENS) * 0.002  # of precision
        found = form_of(
            (fault(sample) + noise).astype(np.float32), sample.logprobs().astype(np.float32), LIMIT, sample.logprobs
        )
        assert found.form is form and least <= found.number <= most, (seed, found)


def test_without_another_reading_and_with_few_tokens_no_form_is_claimed() -> None:
    sample = Sample(0, 1.0)
    plain = sample.logprobs().astype(np.float32)
    assert form_of(colder(sample).astype(np.float32), plain, LIMIT, lambda times: None).form is Form.ALL
    assert form_of(np.roll(plain, 1)[:6], plain[:6], LIMIT, lambda times: plain[:6]).form is Form.ALL
