"""What is usual between trainer and engines, and what is said of a difference that is not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from seamless_verl.trainer import mismatch
from seamless_verl.trainer.mismatch import ENGINE, LEAST, MOST, RECORD, Band, ComparedSample, Mismatch, StoredSample

pytestmark = pytest.mark.integration
RESPONSE = 32
LOGITS = np.random.default_rng(1).normal(size=(RESPONSE, 64))
IDS = np.arange(RESPONSE)
Array = NDArray[np.float32]


def at(temperature: float = 1.0) -> Array:
    scaled = LOGITS / temperature
    found = scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))
    return found[np.arange(RESPONSE), IDS].astype(np.float32)


PLAIN = at()
FAR = (PLAIN + np.random.default_rng(2).normal(size=RESPONSE)).astype(np.float32)


def sample(recorded: Array, older: int = 0) -> StoredSample:
    """A row whose first `older` tokens are of version 3, the others of version 4."""
    versions = np.where(np.arange(RESPONSE) < older, 3, 4)
    return StoredSample("prompt_0_0", [7, 7, *IDS.tolist()], recorded, versions, np.full(RESPONSE, True))


class Server:
    """Reads at any temperature, and says of its weights what it is given."""

    def __init__(self, broken: str | None = "") -> None:
        self.asked: list[list[int]] = []
        self.reread = SimpleNamespace(remote=self._read)
        self.verify_weights = SimpleNamespace(remote=lambda version, staged: broken)

    def _read(self, ids: list[int], version: int, patience_s: float, temperature: float) -> Array:
        self.asked.append(ids)
        return np.concatenate([np.zeros(1, np.float32), at(temperature)])


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[float], Mismatch]]:
    monkeypatch.setattr(mismatch, "in_doubt", lambda reply: reply)

    def compare(*checks: tuple[str, Array, StoredSample], broken: str | None = "") -> tuple[list[float], Mismatch]:
        """Whether each was usual, of a replica, the trainer's logprobs, and what was recorded."""
        servers = {name: Server(broken) for name, *_ in checks}
        judge, usual = Mismatch(lambda: servers, list), []
        for replica, trainer, row in checks:
            judge.now = ComparedSample(4, replica, row, None)
            judge._read = lambda: np.concatenate([np.zeros(1, np.float32), PLAIN])  # type: ignore[method-assign]
            assert judge.judge() == {}, "the trainer has computed nothing yet"
            judge.end_update([np.empty(0, np.float32), np.pad(trainer, (0, 3))])
            usual.append(judge.judge()["seamless/agreement/usual"])
            assert judge.judge() == {}, "judged once"
        return usual, judge

    return compare


def test_a_run_learns_what_is_usual_and_says_a_difference_once() -> None:
    band = Band()
    assert [band.leaves(0.02) for _ in range(8)] == [False] * 8
    assert band.limit() == pytest.approx(0.08)
    assert [band.leaves(mean) for mean in (0.079, 0.09, 0.5, 0.02, 0.09)] == [False, True, False, False, True]


def test_what_no_precision_makes_is_never_learned_and_what_any_makes_never_said() -> None:
    band = Band()
    assert band.leaves(MOST * 1.01) and not band.seen and band.limit() == MOST
    band = Band()
    assert not any(band.leaves(1e-6) for _ in range(8)) and band.limit() == LEAST and not band.leaves(LEAST)


SAME = sample(PLAIN)


@pytest.mark.parametrize(
    ("checks", "likely"),
    [
        ([("a", FAR, SAME)], mismatch.FIRST),
        ([("a", PLAIN, SAME), ("b", FAR, SAME)], mismatch.ANOTHER),
        ([("a", PLAIN, SAME), ("b", PLAIN, SAME), ("a", FAR, SAME), ("b", FAR, SAME)], mismatch.ANOTHER),
        ([("a", FAR, SAME), ("a", PLAIN, SAME), ("a", FAR, SAME)], mismatch.FIRST),
        ([("a", at(0.6), SAME)], "The trainer's are those of about 0.60 times the temperature"),
        ([("a", np.roll(PLAIN, 1), SAME)], "The trainer's logprobs are those of tokens -1 places on"),
        ([("a", np.where(np.arange(RESPONSE) < 16, PLAIN, FAR), SAME)], "They agree up to token 1"),
        ([("a", PLAIN, SAME), ("a", PLAIN, sample(FAR))], mismatch.SAMPLING),
        ([("a", PLAIN, sample(at(1.7)))], "temperature: its record is that of about 1.7"),
        ([("a", PLAIN, sample(np.roll(PLAIN, -1)))], "its record is that of tokens +1 places on"),
        ([("a", PLAIN, sample(np.where(np.arange(RESPONSE) < 16, PLAIN, FAR)))], "tokens: its record agrees up to"),
        ([("a", PLAIN, sample(np.where(IDS == 9, -15, PLAIN)))], "tokens: its record of token 9 "),
        ([("a", PLAIN, SAME), ("a", PLAIN, sample(FAR, older=10))], mismatch.KV.format(4)),
        ([("a", PLAIN, SAME), ("a", PLAIN, sample(at(1.7), older=10))], mismatch.KV.format(4)),
        ([("a", PLAIN, sample(at(1.7), older=10))], "temperature: its record is that of about 1.7"),
        ([("a", PLAIN, sample(FAR)), ("a", PLAIN, SAME), ("a", PLAIN, sample(FAR, older=10))], mismatch.SAMPLING),
    ],
    ids=[
        *("first", "one of two", "one, then both", "alone", "trainer's temperature", "trainer's shift", "positions"),
        *("sampling", "temperature", "shift", "tokens", "one token"),
        *("KV", "KV like a temperature", "temperature alone", "not only KV"),
    ],
)
def test_the_cause_is_found_by_elimination(
    caplog: pytest.LogCaptureFixture,
    compare: Callable[..., tuple[list[float], Mismatch]],
    checks: list[tuple[str, Array, StoredSample]],
    likely: str,
) -> None:
    with caplog.at_level(logging.WARNING):
        usual, _ = compare(*checks)
    assert usual[-1] == 0 and likely in caplog.text
    assert caplog.text.count("Likely") == usual.count(0) - (usual[-2:] == [0, 0])


@pytest.mark.parametrize(
    ("broken", "likely"),
    [
        ("SealError: lm_head", "it has not those that were sent (SealError"),
        ("", "to the bit"),
        (None, "not be compared"),
    ],
)
def test_weights_in_doubt_are_compared_with_those_that_were_sent(
    caplog: pytest.LogCaptureFixture, compare: Any, broken: str | None, likely: str
) -> None:
    with caplog.at_level(logging.WARNING):
        compare(("a", PLAIN, SAME), ("b", FAR, SAME), broken=broken)
    assert mismatch.ANOTHER in caplog.text and likely in caplog.text


def test_the_engines_record_is_judged_by_tokens_of_the_same_version_alone(compare: Any) -> None:
    recorded = PLAIN.copy()
    recorded[:10] = -50
    usual, judge = compare(("a", PLAIN, sample(recorded, older=10)))
    assert usual == [1] and judge.of_record.seen == [], "nothing is learned from tokens behind older ones"


class Replies:
    """A replica whose replies are there, or not."""

    def __init__(self, reply: Any) -> None:
        self.asked: list[int] = []
        self.reread = SimpleNamespace(remote=lambda ids, version, *more: self.asked.append(version) or reply)


def asking(
    monkeypatch: pytest.MonkeyPatch, lasting: list[str], *, reply: Any = None
) -> tuple[Mismatch, dict[str, Any]]:
    servers = {"a": Replies(reply), "b": Replies(reply)}
    monkeypatch.setattr(mismatch, "stored_sample", lambda key: SAME._replace(key=key))
    monkeypatch.setattr(mismatch.Mismatch, "_is_unread", lambda judge: judge.now.reply == "unread")
    return Mismatch(lambda: servers, lambda: ["p_0_0"], lasting=lambda: lasting), servers


ROWS = {
    name: {"min_global_steps": oldest, "max_global_steps": newest}
    for name, oldest, newest in (("old_0_0", 1, 1), ("p_0_0", 0, 1), ("new_0_0", 2, 2), ("mixed_0_0", 1, 2))
}


def test_a_replica_that_goes_on_generating_reads_while_training_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    judge, servers = asking(monkeypatch, ["a", "b"])
    assert judge.ask(2) and not servers["a"].asked, "it has time until the update ends"
    assert judge.begin_update(2, ROWS) == "new_0_0", "what it recorded by these weights can be judged, too"
    assert judge.begin_update(1, ROWS) == "p_0_0", "in every other version one with older tokens"
    assert judge.begin_update(3, ROWS) in ROWS, "no token is of this version"
    assert servers["a"].asked == [2] and servers["b"].asked == [1, 3]


@pytest.mark.parametrize(("reply", "key"), [(None, "p_0_0"), ("unread", "new_0_0")])
def test_a_replica_whose_device_training_takes_reads_before_or_another_does(
    monkeypatch: pytest.MonkeyPatch, reply: Any, key: str
) -> None:
    judge, servers = asking(monkeypatch, ["b"], reply=reply)
    assert judge.ask(2) and servers["a"].asked == [2]
    assert judge.begin_update(2, ROWS) == key
    assert servers["b"].asked == ([] if reply is None else [2])


def test_without_a_replica_that_can_read_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    judge, _ = asking(monkeypatch, [])
    assert judge.begin_update(2, ROWS) == ""
    assert judge.ask(2) and judge.begin_update(2, {"other_0_0": {}}) == ""
    assert {f"{ENGINE}mean", f"{RECORD}mean"}.isdisjoint(judge.judge())
