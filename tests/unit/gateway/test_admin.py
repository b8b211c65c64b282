"""The admin API: mistakes in its bodies, and the file that names its address and key."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from seamless_verl.gateway.admin import Admin, remove_admin_file, write_admin_file
from seamless_verl.gateway.api_errors import ApiError, ErrorCode
from seamless_verl.gateway.protocols import NullRecorder
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
    [({}, ["reward"]), ({"reward": True}, ["reward"]), ({"reward": float("inf"), "name": ""}, ["reward", "name"])],
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


def test_the_admin_file_is_its_owners_only_and_replaces_an_old_one(tmp_path: Path) -> None:
    path = tmp_path / "journal.admin.json"
    path.write_text("an old one")
    path.chmod(0o644)
    with path.open() as old:
        write_admin_file(path, url="http://127.0.0.1:80", key="k")
        assert old.read() == "an old one", "it was written into, not replaced"
    assert json.loads(path.read_text()) == {"url": "http://127.0.0.1:80", "key": "k"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path], "a temporary file is left"
    remove_admin_file(path)
    remove_admin_file(path)
    assert not list(tmp_path.iterdir())


def test_an_admin_file_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise OSError("read only")

    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(OSError, match="read only"):
        write_admin_file(tmp_path / "journal.admin.json", url="u", key="k")
    assert not list(tmp_path.iterdir())
