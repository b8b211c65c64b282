"""The journal against a model in plain dicts: a restored journal equals one that never stopped."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.journal import open_journal, write

from seamless_verl.errors import JournalOrderError
from seamless_verl.journal import (
    CallEnded,
    CallStarted,
    ChunkAppended,
    Event,
    HandedOver,
    HandOverBegun,
    RewardPosted,
    SessionClosed,
    SessionOpened,
    Stage,
    StoredSession,
)
from seamless_verl.trajectory.records import Finish, TokenChunk, logprobs, tokens

CHOICE = st.integers(0, 1 << 16)
RUN = st.lists(st.integers(0, 150_000), min_size=1, max_size=3)
RUN_OF_VERSION = st.tuples(RUN, st.integers(0, 200), st.integers(0, 1), st.sampled_from(["r0", "r1"]))


@dataclass
class Call:
    prompt: list[int]
    request: dict[str, Any]
    generated: list[tuple[int, float, int, str]] = field(default_factory=list)  # id, logprob, version, replica
    finish: Finish | None = None
    reply: dict[str, Any] = field(default_factory=dict)

    @property
    def whole(self) -> list[int]:
        return self.prompt + [token for token, *_ in self.generated]


@dataclass
class Session:
    stage: Stage = Stage.OPEN
    reason: str | None = None
    handed_over_at: float = 0.0
    calls: dict[str, Call] = field(default_factory=dict)
    rewards: dict[str, float] = field(default_factory=dict)


class AgainstAModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.journal = open_journal(self.folder)
        self.model: dict[str, Session] = {}
        self.names = 0

    def teardown(self) -> None:
        self.journal.check_integrity()
        self.journal.close()
        shutil.rmtree(self.folder)

    def name(self) -> str:
        self.names += 1
        return f"n{self.names}"

    def in_stage(self, stage: Stage) -> list[str]:
        return [name for name, session in self.model.items() if session.stage is stage]

    def open_calls(self) -> list[tuple[str, Call]]:
        calls = [item for name in self.in_stage(Stage.OPEN) for item in self.model[name].calls.items()]
        return [(call_id, call) for call_id, call in calls if call.finish is None]

    @precondition(lambda self: len(self.in_stage(Stage.OPEN)) < 2)  # few, so that each gets some events
    @rule()
    def open(self) -> None:
        name = self.name()
        write(self.journal, SessionOpened(name, f"uid of {name}", {"of": name}, 2.5))
        self.model[name] = Session()

    @precondition(lambda self: self.in_stage(Stage.OPEN))
    @rule(which=CHOICE, base=CHOICE, keep=st.sampled_from([1.0, 0.9, 0.5, 0.0]), run=RUN, times=st.integers(0, 400))
    def start(self, which: int, base: int, keep: float, run: list[int], times: int) -> None:
        """The prompt repeats a part of some earlier call: a next turn, a fork, or something new."""
        owner = self.in_stage(Stage.OPEN)[which % len(self.in_stage(Stage.OPEN))]
        calls = list(self.model[owner].calls.values())
        trunk = calls[base % len(calls)].whole if calls else []
        call = Call(trunk[: round(keep * len(trunk))] + run * times, {"model": "m", "messages": [str(run)] * times})
        call_id = self.name()
        write(self.journal, CallStarted(owner, call_id, f"digest {call_id}", tokens(call.prompt), call.request))
        self.model[owner].calls[call_id] = call

    @precondition(lambda self: self.open_calls())
    @rule(which=CHOICE, runs=st.lists(RUN_OF_VERSION, max_size=4), end=CHOICE)
    def generate(self, which: int, runs: list[tuple[list[int], int, int, str]], end: int) -> None:
        """Some chunks, and sometimes the call's end in the same append."""
        call_id, call = self.open_calls()[which % len(self.open_calls())]
        events: list[Event] = []
        for run, times, version, replica in runs:
            values = [-0.25 * (token % 5) for token in run * times]
            events.append(ChunkAppended(call_id, TokenChunk(tokens(run * times), logprobs(values), version, replica)))
            call.generated += [
                (token, value, version, replica) for token, value in zip(run * times, values, strict=True)
            ]
        if end % 3 == 0:
            call.finish, call.reply = list(Finish)[end % 5], {"content": "é" * (end % 50)}
            events.append(CallEnded(call_id, call.finish, call.reply))
        write(self.journal, *events)

    @precondition(lambda self: self.in_stage(Stage.OPEN) + self.in_stage(Stage.CLOSED))
    @rule(which=CHOICE, name=st.sampled_from(["score", "style"]), value=st.integers(-3, 3))
    def reward(self, which: int, name: str, value: int) -> None:
        owners = self.in_stage(Stage.OPEN) + self.in_stage(Stage.CLOSED)
        write(self.journal, RewardPosted(owners[which % len(owners)], name, value / 4))
        self.model[owners[which % len(owners)]].rewards[name] = value / 4

    @precondition(lambda self: self.in_stage(Stage.OPEN))
    @rule(which=CHOICE)
    def close(self, which: int) -> None:
        owner = self.in_stage(Stage.OPEN)[which % len(self.in_stage(Stage.OPEN))]
        write(self.journal, SessionClosed(owner, f"done {which}"))
        self.model[owner].stage, self.model[owner].reason = Stage.CLOSED, f"done {which}"

    @precondition(lambda self: self.in_stage(Stage.CLOSED))
    @rule(which=CHOICE)
    def begin_hand_over(self, which: int) -> None:
        owner = self.in_stage(Stage.CLOSED)[which % len(self.in_stage(Stage.CLOSED))]
        write(self.journal, HandOverBegun(owner))
        self.model[owner].stage = Stage.HANDING

    @precondition(lambda self: self.in_stage(Stage.HANDING))
    @rule(which=CHOICE, at=st.integers(0, 100))
    def end_hand_over(self, which: int, at: int) -> None:
        owner = self.in_stage(Stage.HANDING)[which % len(self.in_stage(Stage.HANDING))]
        write(self.journal, HandedOver(owner, at))
        self.model[owner].stage, self.model[owner].handed_over_at = Stage.HANDED, at

    @rule(which=CHOICE, kind=CHOICE)
    def reject(self, which: int, kind: int) -> None:
        """An append whose last event is invalid leaves no trace of the events before it."""
        fresh, late = self.name(), [name for name, session in self.model.items() if session.stage is not Stage.OPEN]
        begin: list[Event] = [SessionOpened(fresh, "u", {}, 0.0), CallStarted(fresh, fresh, "d", tokens([1] * 999))]
        begin += [
            ChunkAppended(fresh, TokenChunk(tokens([5]), logprobs([0]), 9, f"replica {fresh}")),
            CallEnded(fresh, Finish.STOP),
        ]
        for name in self.in_stage(Stage.OPEN):
            begin += [CallStarted(name, f"{fresh} {name}", "d", tokens([1, 2] * 700)), SessionClosed(name, "refused")]
        impossible: list[Event] = [
            ChunkAppended("nowhere", TokenChunk(tokens([1]), logprobs([0]), 0, "r")),
            HandedOver(fresh, 0),
        ]
        impossible += [SessionOpened(fresh, "again", {}, 0.0), CallEnded(fresh, Finish.STOP)]
        impossible += [SessionClosed(late[which % len(late)], "again")] if late else []
        with pytest.raises(JournalOrderError):
            write(self.journal, *begin, impossible[kind % len(impossible)])

    @rule(before=st.integers(0, 100), tight=st.booleans())
    def compact(self, before: int, tight: bool) -> None:
        done = asyncio.run(self.journal.compact(before, 0 if tight else None))
        gone = [name for name in self.in_stage(Stage.HANDED) if tight or self.model[name].handed_over_at < before]
        assert done.sessions == len(gone)
        for name in gone:
            del self.model[name]

    @rule()
    def restart(self) -> None:
        self.journal.close()
        self.journal = open_journal(self.folder)

    @invariant()
    def what_it_returns_equals_the_model(self) -> None:
        assert [record.session_id for record in self.journal.restore()] == self.in_stage(Stage.OPEN)
        assert [line.session_id for line in self.journal.sessions()] == list(self.model)
        for line in self.journal.sessions():
            session = self.model[line.session_id]
            assert (line.calls, line.stage) == (len(session.calls), session.stage)
            assert line.tokens == sum(len(call.generated) for call in session.calls.values())
        for name, session in self.model.items():
            record = self.journal.read(name)
            assert record is not None and self.journal.stage(name) is session.stage
            assert_equal(record, name, session)


def assert_equal(record: StoredSession, name: str, session: Session) -> None:
    assert (record.session_id, record.uid, record.settings) == (name, f"uid of {name}", {"of": name})
    assert (record.stage, record.reason, record.opened_at) == (session.stage, session.reason, 2.5)
    assert record.rewards == session.rewards
    assert [call.call_id for call in record.calls] == list(session.calls)
    for found, call in zip(record.calls, session.calls.values(), strict=True):
        assert found.prompt_ids.tolist() == call.prompt and found.digest == f"digest {found.call_id}"
        assert (found.finish, found.reply, found.request) == (call.finish, call.reply, call.request)
        assert found.interrupted is (call.finish is None)
        expected = [(label, list(run)) for label, run in groupby(call.generated, key=lambda token: token[2:])]
        assert [(segment.version, segment.replica) for segment in found.segments] == [label for label, _ in expected]
        for segment, (_, run) in zip(found.segments, expected, strict=True):
            assert segment.ids.tolist() == [token for token, *_ in run]
            assert segment.logprobs.tolist() == [value for _, value, *_ in run]


AgainstAModel.TestCase.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
test_the_journal_agrees_with_a_model = AgainstAModel.TestCase
