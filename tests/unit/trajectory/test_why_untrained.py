"""Why a session has nothing to train: the sentence names the setting, the length and what became of its calls."""

from __future__ import annotations

import re

import pytest
from support.trajectory import session, turn

from seamless_verl.trajectory.policies import TrainAll
from seamless_verl.trajectory.records import Finish, Grammar, Segment, logprobs, tokens
from seamless_verl.trajectory.sequences import SequenceLimits, assemble, why_untrained
from seamless_verl.trajectory.session import SessionRecord

FORCED = Segment(tokens([2]), logprobs([-1.0]), 0, "r", bytearray([Grammar.FORCED]))
KEYS = "data.max_prompt_length=2 + data.max_response_length=2"


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (session(), "no call of its agent was answered"),
        (session(turn("a", [1], [])), "its 1 calls generated no token"),
        (session(turn("a", [1] * 7, [2])), f"its prompt of 7 tokens leaves no room for a response in the 4 .*{KEYS}"),
        (session(turn("a", [1], [2], finish=Finish.FAILED)), "none of its 1 calls finished .1 failed."),
        (session(turn("a", [1], [FORCED])), "a grammar .* Set seamless.tokens.grammar=train_all to train them"),
    ],
)
def test_the_reason_is_named(record: SessionRecord, said: str) -> None:
    limits = SequenceLimits(4)
    assert assemble(record, TrainAll(), 0, limits).sequences == []
    reason = why_untrained(record.tree, limits, KEYS)

    assert re.match(said.replace(" + ", r" \+ "), reason)
