"""Sessions: keys, states and quotas, over every order in which requests come and go."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from seamless_verl.errors import IntegrityError
from seamless_verl.gateway.api_errors import Api, ApiError, ErrorCode
from seamless_verl.gateway.http_responses import send_error
from seamless_verl.gateway.session import SamplingParameters, Session, SessionLimits, SessionSampling, SessionState
from seamless_verl.gateway.sessions import SessionTable
from seamless_verl.rollout.paused_time import PausedTime
from seamless_verl.runtime.process import LATE_S, AwakeTime


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def refused(code: ErrorCode, call: Any, *args: Any, **kwargs: Any) -> ApiError:
    with pytest.raises(ApiError) as caught, ExitStack() as stack:
        result = call(*args, **kwargs)
        if hasattr(result, "__enter__"):
            stack.enter_context(result)
    assert caught.value.code is code
    return caught.value


def test_a_key_finds_its_session_and_is_not_kept() -> None:
    table = SessionTable()
    one, key = table.open("u")
    two, other = table.open("u")
    assert table.by_key(key) is one and table.by_key(other) is two
    assert len(key) >= 40 and key not in repr(vars(one))
    for wrong in ("", None):
        refused(ErrorCode.MISSING_KEY, table.by_key, wrong)
    for wrong in (key[:-1], key + "x", "\ud800"):
        refused(ErrorCode.UNKNOWN_KEY, table.by_key, wrong)


def test_a_restored_session_goes_on_with_its_key() -> None:
    table, key = SessionTable(), "its old key"
    opened, key = table.open("u", limits=SessionLimits(max_turns=2))
    opened.turns, opened.requests = 1, 3
    later = SessionTable()
    later.restore(opened)
    with later.admit(later.by_key(key)):
        assert (opened.turns, opened.requests) == (2, 4)
    with pytest.raises(ValueError, match="is taken"):
        later.restore(Session(opened.session_id, "u", b"another"))


def test_an_expiry_is_returned_once_however_it_was_found() -> None:
    clock = Clock()
    table = SessionTable(clock=clock)
    seen, key = table.open("u", limits=SessionLimits(lifetime=10))
    unseen, _ = table.open("u", limits=SessionLimits(lifetime=10))
    lasting, _ = table.open("u")
    clock.now += 10
    refused(ErrorCode.EXPIRED, table.admit, table.by_key(key))
    assert sorted(one.session_id for one in table.expire()) == sorted([seen.session_id, unseen.session_id])
    assert table.expire() == [] and lasting.state is SessionState.OPEN
    assert not table.close(seen.session_id, "late") and seen.state is SessionState.EXPIRED


def test_a_repetition_costs_no_turn_and_is_served_when_the_quota_is_used_up() -> None:
    table = SessionTable()
    session, _ = table.open("u", limits=SessionLimits(max_turns=1))
    with table.admit(session):
        pass
    refused(ErrorCode.QUOTA, table.admit, session)
    with table.admit(session, new_turn=False):
        assert (session.turns, session.requests) == (1, 2)


def test_a_request_that_can_never_fit_is_not_asked_to_wait() -> None:
    table = SessionTable(max_running=2)
    session, _ = table.open("u")
    refused(ErrorCode.UNSUPPORTED, table.admit, session, 3)
    with table.admit(session, 2):
        assert refused(ErrorCode.BUSY, table.admit, session).retry_after


def test_only_an_ended_session_is_forgotten() -> None:
    table = SessionTable()
    session, key = table.open("u")
    with pytest.raises(ValueError, match="close it first"):
        table.forget(session.session_id)
    table.close(session.session_id, "done")
    refused(ErrorCode.CLOSED, table.admit, session)
    table.forget(session.session_id)
    refused(ErrorCode.CLOSED, table.by_key, key)
    refused(ErrorCode.NOT_FOUND, table.get, session.session_id)
    table.check_integrity()


def test_a_change_of_the_system_s_time_ends_no_lifetime() -> None:
    clock, day = Clock(), Clock()
    table = SessionTable(clock=clock, time_of_day=day)
    session, _ = table.open("u", limits=SessionLimits(lifetime=10))
    day.now += 1e6
    assert not table.expire()
    day.now -= 2e6
    clock.now += 10
    assert table.expire() == [session]


def test_a_session_that_is_restored_has_lived_before() -> None:
    day = Clock()
    session, _ = SessionTable(time_of_day=day).open("u", limits=SessionLimits(lifetime=10))
    day.now += 4
    later = SessionTable(clock=(clock := Clock()), time_of_day=day)
    later.restore(session)
    clock.now += 5
    assert not later.expire() and later.quiet_s() == {session.session_id: 5.0}
    clock.now += 1
    assert later.expire() == [session]


def test_a_lifetime_runs_from_the_opening_also_before_the_first_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway that takes long to start opens its first sessions before it looks for expired ones."""
    clock = Clock()
    monkeypatch.setattr("seamless_verl.gateway.sessions.AwakeTime", lambda: AwakeTime(now=clock))
    table = SessionTable()
    clock.now += 10 * LATE_S
    _, key = table.open("u", limits=SessionLimits(lifetime=LATE_S / 2))
    clock.now += LATE_S / 2
    refused(ErrorCode.EXPIRED, table.admit, table.by_key(key))


def test_a_lifetime_does_not_count_the_time_in_which_the_process_stood_still(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("seamless_verl.gateway.sessions.AwakeTime", lambda: AwakeTime(now=clock))
    table = SessionTable()
    session, _ = table.open("u", limits=SessionLimits(lifetime=LATE_S + 3))
    for seconds in (1, 500, 1):
        clock.now += seconds
        assert not table.expire()
    clock.now += 1
    assert table.expire() == [session]


def test_a_stop_in_which_a_call_waited_makes_no_session_live_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seconds in which calls waited are of the sessions' clock, which leaves a stop out already."""
    clock = Clock()
    monkeypatch.setattr("seamless_verl.gateway.sessions.AwakeTime", lambda: AwakeTime(now=clock))
    table = SessionTable()
    times = PausedTime(table.clock)
    table.paused_s = times.total
    session, _ = table.open("u", limits=SessionLimits(lifetime=3))
    waiting = times.begin(session.session_id)
    waiting.set(True)
    clock.now += 500
    assert not table.expire()
    waiting.set(False)
    for _ in range(2):
        clock.now += 1
        assert not table.expire()
    clock.now += 1
    assert table.expire() == [session]


def test_how_long_a_session_had_no_call_counts_from_its_last_one() -> None:
    table = SessionTable(clock=(clock := Clock()))
    one, other, closed = (table.open("u")[0] for _ in range(3))
    table.close(closed.session_id, "done")
    clock.now += 7
    with table.admit(one):
        assert table.quiet_s() == {other.session_id: 7.0}
        clock.now += 2
    clock.now += 1
    assert table.quiet_s() == {one.session_id: 1.0, other.session_id: 10.0}


def test_a_lost_place_is_noticed() -> None:
    table = SessionTable()
    session, _ = table.open("u")
    session.running += 1
    with pytest.raises(IntegrityError, match="running"):
        table.check_integrity()


@given(st.integers(1, 50), st.integers(0, 60), st.one_of(st.none(), st.integers(1, 20)))
def test_a_call_gets_what_is_left_within_the_cap(quota: int, used: int, cap: int | None) -> None:
    session = Session("s", "u", b"", limits=SessionLimits(max_tokens=quota), sampling=SessionSampling(max_tokens=cap))
    session.tokens += used
    budget = session.call_budget()
    assert budget == min(max(quota - used, 0), cap if cap is not None else quota)
    assert Session("s", "u", b"").call_budget() is None


class Traffic(RuleBasedStateMachine):
    """Requests of several sessions come and go; no bound is ever passed, and every place is given back."""

    sessions = Bundle("sessions")

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.table = SessionTable(max_running=4, clock=self.clock)
        self.inside: list[tuple[Session, int, ExitStack]] = []

    @rule(
        target=sessions,
        turns=st.one_of(st.none(), st.integers(1, 3)),
        concurrent=st.one_of(st.none(), st.integers(1, 3)),
        lifetime=st.one_of(st.none(), st.integers(1, 5)),
    )
    def open(self, turns: int | None, concurrent: int | None, lifetime: int | None) -> Session:
        return self.table.open("u", limits=SessionLimits(turns, None, concurrent, lifetime))[0]

    @rule(session=sessions, calls=st.integers(1, 3))
    def enter(self, session: Session, calls: int) -> None:
        stack, turns = ExitStack(), session.turns
        fits = session.limits.max_concurrent is None or session.running + calls <= session.limits.max_concurrent
        self.table.get(session.session_id)  # it ages
        open_ = session.state is SessionState.OPEN
        left = session.limits.max_turns is None or turns < session.limits.max_turns
        try:
            stack.enter_context(self.table.admit(session, calls))
        except ApiError:
            assert not (open_ and left and fits and self.table.running + calls <= 4)
            assert session.turns == turns
        else:
            assert open_ and left and fits
            self.inside.append((session, calls, stack))

    @rule(at=st.integers(0, 20))
    def leave(self, at: int) -> None:
        if self.inside:
            self.inside.pop(at % len(self.inside))[2].close()

    @rule(session=sessions)
    def close(self, session: Session) -> None:
        self.table.close(session.session_id, "done")
        assert session.state is not SessionState.OPEN

    @rule()
    def wait(self) -> None:
        self.clock.now += 1

    @invariant()
    def adds_up(self) -> None:
        self.table.check_integrity()
        assert self.table.running == sum(calls for _, calls, _ in self.inside) <= 4


Traffic.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_traffic = Traffic.TestCase


def test_overrides_always_apply_and_defaults_where_a_request_sets_nothing() -> None:
    sampling = SessionSampling(SamplingParameters(top_p=0.5, seed=3), SamplingParameters(temperature=1.0))
    assert sampling.resolve({"top_p": 0.9, "temperature": 0}) == {"seed": 3, "temperature": 1.0}
    assert sampling.resolve({"top_p": None}) == {"top_p": 0.5, "seed": 3, "temperature": 1.0}


@pytest.mark.parametrize("code", ErrorCode)
def test_every_error_has_a_status_and_both_forms(code: ErrorCode) -> None:
    error = ApiError(code, "why", retry_after=3)
    one, other = error.body(Api.OPENAI), error.body(Api.ANTHROPIC)
    assert error.status == code.status and 400 <= code.status < 500
    assert one["error"]["code"] == code and other["type"] == "error"
    assert one["error"]["message"] == other["error"]["message"] == "why"


async def test_an_error_says_when_to_try_again() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await send_error(send, ApiError(ErrorCode.BUSY, "why", retry_after=3), Api.OPENAI)
    assert sent[0]["status"] == 429 and (b"retry-after", b"3") in sent[0]["headers"]


def test_a_lifetime_does_not_count_the_time_in_which_calls_waited() -> None:
    clock = Clock()
    table = SessionTable(clock=clock)
    table.paused_s = lambda session_id: 5.0
    session, _ = table.open("u", limits=SessionLimits(lifetime=10))
    clock.now += 14
    assert not table.expire() and session.state is SessionState.OPEN
    clock.now += 1
    assert table.expire() == [session] and session.state is SessionState.EXPIRED


def seeds(session: Session, *asked: int) -> list[int]:
    return [session.seeded({"seed": seed, "top_p": 0.9})["seed"] for seed in asked]


def sample(session_id: str, uid: str, number: str | None) -> Session:
    return Session(session_id, uid, b"", metadata={} if number is None else {"session": number})


def test_a_seed_repeats_within_a_session_and_gives_each_sample_of_a_prompt_its_own_noise() -> None:
    """Equal samples of a group have no advantage."""
    group = [sample(f"s{number}", "u", str(number)) for number in range(8)]
    by_hand = [sample("s8", "u", None), sample("s9", "u", None), sample("s10", "v", "0")]
    first = [seeds(session, 42) for session in group + by_hand]
    assert first == [seeds(session, 42) for session in group + by_hand]
    assert len({seed for (seed,) in first}) == 11
    assert len(set(seeds(group[0], -(1 << 63), -1, 0, 1, 42, (1 << 63) - 1))) == 6


def test_a_session_that_begins_another_again_has_its_noise() -> None:
    assert seeds(sample("lost", "u", "3"), 7) == seeds(sample("its successor", "u", "3"), 7)


@pytest.mark.parametrize("seed", [-(1 << 63), 0, 42, (1 << 63) - 1])
def test_the_choices_of_a_request_have_seeds_one_after_another_as_vllm_gives_them(seed: int) -> None:
    session = sample("s", "u", "0")
    derived = [session.seeded({"seed": seed + choice}, choice)["seed"] for choice in range(3)]
    assert derived == [derived[0], derived[0] + 1, derived[0] + 2]
    assert all(0 <= one < 1 << 63 for one in derived)


def test_without_a_seed_nothing_is_changed() -> None:
    sampling = {"top_p": 0.9}
    assert sample("s", "u", "0").seeded(sampling) == sampling
