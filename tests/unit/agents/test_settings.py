"""An entry of the file of agent loops: what it opens a session with, and how its command is limited."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import AsyncMock

import pytest
from omegaconf import OmegaConf

from seamless_verl.agents.limits import CommandLimits
from seamless_verl.agents.settings import (
    SLACK_S,
    TRAINERS,
    CallableSettings,
    CommandSettings,
    SamplingDefaults,
    read_settings,
)
from seamless_verl.errors import ConfigErrors
from seamless_verl.gateway.admin import Admin
from seamless_verl.gateway.session import SamplingParameters, SessionLimits
from seamless_verl.gateway.sessions import SessionTable
from seamless_verl.runtime.fields import rows

KINDS = (SamplingDefaults, SamplingParameters)
SESSION = {"max_turns": 20, "max_tokens": 8192, "max_concurrent": 4}
SAMPLING = {"min_p": 0.02, "seed": 7}
VERLS = {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}


async def test_an_opened_session_has_the_limits_and_the_sampling_of_its_loop() -> None:
    entry = OmegaConf.create({"name": "mine", "agent": "a:b", "time_limit_s": 60, "session": SESSION})
    entry.sampling = SAMPLING
    settings = read_settings(CallableSettings, entry, key="mine")
    opening = settings.opening("uid", "3", sampling_params=VERLS, max_tokens=512)
    table = SessionTable()
    admin = Admin(table, AsyncMock(), cancel=AsyncMock())
    session = table.get((await admin.open(opening))["session_id"])
    assert session.limits == SessionLimits(**SESSION, lifetime=60 + SLACK_S)
    assert session.metadata == {"session": "3"} and session.uid == "uid"
    assert session.sampling.max_tokens == 512
    theirs = {"min_p": 0.5, "temperature": 2.0}
    trainers = {name: VERLS[name] for name in TRAINERS}
    assert session.sampling.resolve(theirs) == {"seed": 7, **trainers}  # the agent's own min_p stays
    assert session.sampling.resolve({}) == SAMPLING | trainers


def test_an_entry_without_them_sets_none() -> None:
    opening = CallableSettings(agent="a:b").opening("uid", "0", sampling_params={}, max_tokens=9)
    assert opening["limits"] == {"lifetime": 600 + SLACK_S}
    assert opening["sampling"] == {"defaults": {}, "overrides": {}, "max_tokens": 9}


def test_sampling_defaults_and_the_trainers_parameters_are_those_of_the_gateway() -> None:
    ours, gateways = ({row.key: (row.type, row.allowed) for row in rows(kind, "x")} for kind in KINDS)
    trainers = {f"x.{name}" for name in TRAINERS}
    assert ours.keys() | trainers == gateways.keys() and not ours.keys() & trainers
    assert ours.items() <= gateways.items()


def test_a_command_has_the_limits_of_its_entry(tmp_path: Path) -> None:
    entry = {"command": ["sleep", 1], "time_limit_s": 60, "limits": {"cpu_s": 30, "file_bytes": 10485760}}
    settings = read_settings(CommandSettings, entry | {"folder": str(tmp_path), "env": {"A": "1"}}, key="mine")
    command = settings.agent_command
    assert command.limits == CommandLimits(wall_s=60, cpu_s=30, file_bytes=10485760)
    assert (command.command, command.folder, command.env) == (["sleep", "1"], str(tmp_path), {"A": "1"})


def test_what_is_set_elsewhere_is_refused_with_the_place() -> None:
    entry = {"command": "true", "limits": {"wall_s": 3}, "sampling": {"top_p": 0.5, "repetition_penalty": 1.1}}
    with pytest.raises(ConfigErrors) as caught:
        read_settings(CommandSettings, entry, key="mine")
    assert [(mistake.key, mistake.way_out) for mistake in caught.value.mistakes] == [
        ("mine.sampling.top_p", "Set actor_rollout_ref.rollout.top_p instead"),
        ("mine.sampling.repetition_penalty", "Leave it out: verl samples with 1.0"),
        ("mine.limits.wall_s", "Set mine.time_limit_s instead"),
    ]
