"""The admin API: mistakes in its bodies, rewards, and its bound."""

from __future__ import annotations

from typing import Any

import pytest
from support.journal import NullRecorder

from seamless_verl.gateway.admin import Admin
from seamless_verl.gateway.api_errors import ApiError, ErrorCode
from seamless_verl.gateway.session import SamplingParameters, SessionLimits, SessionSampling
from seamless_verl.gateway.sessions import SessionTable


async def cancel(session_id: str) -> None:
    """No call runs."""


def make_admin() -> tuple[Admin, SessionTable]:
    table = SessionTable()
    return Admin(table, NullRecorder(), cancel=cancel, url="http://here"), table


async def refusal(body: dict[str, Any]) -> ApiError:
    admin, table = make_admin()
    with pytest.raises(ApiError) as caught:
        await admin.open(body)
    assert caught.value.code is ErrorCode.MALFORMED and len(table) == 0
    return caught.value


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("limits", {"max_turns": 0}, "limits.max_turns=0"),
        ("limits", {"max_turns": 1.5}, "limits.max_turns=1.5"),
        ("limits", {"max_tokens": True}, "limits.max_tokens=True"),
        ("limits", {"lifetime": "long"}, "limits.lifetime='long'"),
        ("limits", {"lifetime": 0}, "limits.lifetime=0"),
        ("limits", {"turns": 3}, "limits.turns=3"),
        ("limits", [1], "limits=[1]"),
        ("sampling", {"overrides": {"temperature": -1}}, "sampling.overrides.temperature=-1"),
        ("sampling", {"overrides": {"presence_penalty": 2.5}}, "sampling.overrides.presence_penalty=2.5"),
        ("sampling", {"defaults": {"heat": 1}}, "sampling.defaults.heat=1"),
        ("sampling", {"defaults": {"top_k": -2}}, "sampling.defaults.top_k=-2"),
        ("sampling", {"defaults": 3}, "sampling.defaults=3"),
        ("sampling", {"max_tokens": 0}, "sampling.max_tokens=0"),
        ("sampling", {"overrides": {"seed": 1 << 63}}, "sampling.overrides.seed=9223372036854775808"),
        ("metadata", [1], "metadata=[1]"),
        ("uid", "", "uid=''"),
        ("colour", "red", "colour='red'"),
    ],
)
async def test_a_setting_that_is_not_valid_is_named(key: str, value: Any, named: str) -> None:
    error = await refusal({"uid": "u", key: value})
    assert str(error).startswith(named) and error.param == named.partition("=")[0]


async def test_all_mistakes_of_a_body_are_reported_at_once() -> None:
    error = await refusal(
        {"limits": {"max_turns": 0, "max_tokens": "few"}, "sampling": {"defaults": {"top_p": 2}}, "colour": "red"}
    )
    lines = str(error).splitlines()
    assert [line.partition("=")[0] for line in lines] == [
        *("colour", "uid", "limits.max_turns", "limits.max_tokens", "sampling.defaults.top_p")
    ]
    assert error.param == "colour"


async def test_settings_that_are_valid_are_the_sessions() -> None:
    admin, table = make_admin()
    opened = await admin.open(
        {
            "uid": "u",
            "limits": {"max_turns": 3, "lifetime": 10},
            "sampling": {"defaults": {"top_k": 5}, "overrides": {"temperature": 1}, "max_tokens": 7},
            "metadata": {"a": [1]},
        }
    )
    session = table.get(opened["session_id"])
    assert session.limits == SessionLimits(max_turns=3, lifetime=10.0)
    assert session.sampling == SessionSampling(SamplingParameters(top_k=5), SamplingParameters(temperature=1.0), 7)
    assert session.metadata == {"a": [1]}


@pytest.mark.parametrize(
    ("body", "params"),
    [
        ({}, ["reward"]),
        ({"reward": "1"}, ["reward"]),
        ({"reward": float("inf"), "name": ""}, ["reward", "name"]),
        ({"reward": 10**400, "name": "n" * 201}, ["reward", "name"]),
    ],
)
async def test_a_reward_that_is_not_valid_is_refused(body: dict[str, Any], params: list[str]) -> None:
    admin, table = make_admin()
    session, _ = table.open("u")
    with pytest.raises(ApiError) as caught:
        await admin.reward(session, body)
    assert [line.partition("=")[0] for line in str(caught.value).splitlines()] == params
    assert await admin.reward(session, {"reward": 1}) == {
        "session_id": session.session_id,
        "name": "reward",
        "reward": 1.0,
    }


async def test_a_session_takes_one_reward_of_a_name_while_it_is_open() -> None:
    admin, table = make_admin()
    session, _ = table.open("u")
    path = f"/admin/sessions/{session.session_id}/reward"
    for _ in range(2):
        assert (await admin.handle("POST", path, {"reward": 1}))["reward"] == 1.0
    await admin.reward(session, {"reward": 0.5, "name": "tests"})
    with pytest.raises(ApiError, match=r"has the reward .* already") as caught:
        await admin.reward(session, {"reward": 0.5})
    assert caught.value.status == 409
    table.close(session.session_id, "finished")
    with pytest.raises(ApiError, match="takes no reward any more") as caught:
        await admin.reward(session, {"reward": 1})
    assert caught.value.status == 410


async def test_a_session_that_was_handed_over_is_described_as_it_ended() -> None:
    """A client whose reply to the closing was lost closes again."""
    admin, table = make_admin()
    opened, _ = table.open("u", metadata={"mine": 1})
    path = f"/admin/sessions/{opened.session_id}"
    closed = await admin.handle("POST", f"{path}/close", {})
    table.forget(opened.session_id)
    assert (closed["state"], closed["reason"], closed["metadata"]) == ("closed", "finished", {"mine": 1})
    assert await admin.handle("POST", f"{path}/close", {"reason": "failed"}) == closed
    assert await admin.handle("GET", path, {}) == closed
    with pytest.raises(ApiError) as caught:
        await admin.handle("POST", "/admin/sessions/another/close", {})
    assert caught.value.status == 404
