"""`seamless-verl runner`: what it is given on the command line, and what it refuses."""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import signal
from pathlib import Path

import pytest
from support.cli import Capture
from support.paths import DATA

from seamless_verl.agents.limits import CommandLimits
from seamless_verl.cli.main import main
from seamless_verl.cli.runner import agents_of, command_of, place_of, split_name
from seamless_verl.client import AdminFile
from seamless_verl.errors import ConfigError

AGENT = f"{DATA / 'runner_agent.py'}:run"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("pkg.module:run", ("default", "pkg.module:run")),
        ("coder=pkg.module:run", ("coder", "pkg.module:run")),
        ("a-b_2=python x.py --n=3", ("a-b_2", "python x.py --n=3")),
        ("python x.py --n=3", ("default", "python x.py --n=3")),
        ("=x", ("default", "=x")),
    ],
)
def test_an_agent_may_have_a_name(value: str, expected: tuple[str, str]) -> None:
    assert split_name(value) == expected


def options(**given: object) -> argparse.Namespace:
    defaults = {"agent": [], "command": [], "folder": None, "env": [], "limit": [], "connect": None, "admin_file": None}
    defaults["keep_failed"] = None
    return argparse.Namespace(**defaults | given)


def test_agents_are_loaded_by_name() -> None:
    assert agents_of(options(agent=[AGENT, f"b={AGENT}"], command=["c=echo {question}"])).keys() == {
        "default",
        "b",
        "c",
    }
    for wrong in (options(), options(agent=[AGENT, AGENT]), options(agent=["no.such.module:run"])):
        with pytest.raises(ConfigError, match="--agent"):
            agents_of(wrong)


def test_a_command_that_begins_with_a_variable_is_no_agent_of_that_name() -> None:
    with pytest.raises(ConfigError, match="PYTHONPATH= is taken for the agent") as raised:
        agents_of(options(command=["PYTHONPATH=. python agent.py"]))
    assert "write default=PYTHONPATH=..." in str(raised.value)
    commands = ["default=PYTHONPATH=. python agent.py", "Coder2=true", "GSM8K=sh ./solve.sh"]
    named = agents_of(options(command=commands, agent=[f"MINE={AGENT}"]))
    assert named.keys() == {"default", "Coder2", "GSM8K", "MINE"}


def test_commands_have_the_variables_and_limits_that_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "secret")
    given = options(
        folder=str(DATA),
        env=["A=b=c", "TOKEN", "EMPTY="],
        limit=["cpu_s=30", "grace_s=0.5", "open_files=9"],
        keep_failed="failed",
    )
    command = command_of("true", given)
    assert command.env == {"A": "b=c", "TOKEN": "secret", "EMPTY": ""} and command.folder == str(DATA)
    assert command.limits == CommandLimits(cpu_s=30, grace_s=0.5, open_files=9)
    assert command.keep_failed == "failed"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"env": ["NOT_SET_HERE"]}, "--env='NOT_SET_HERE': has no value"),
        ({"env": ["=x"]}, "--env='=x': has no value"),
        ({"env": ["HOME=/root"]}, "env='HOME': is set for each session"),
        ({"limit": ["wall_s=3"]}, "--limit='wall_s=3': there is no limit 'wall_s' to set"),
        ({"limit": ["cpu_s"]}, "--limit.cpu_s=''"),
        ({"limit": ["cpu_s=0"]}, "--limit.cpu_s=0"),
        ({"limit": ["cpu_s=soon"]}, "--limit.cpu_s='soon'"),
        ({"limit": ["cpu_s=3"], "command": [], "agent": [AGENT]}, "--limit=.*: is for commands, and there is none"),
        ({"folder": "x", "command": [], "agent": [AGENT]}, "--folder='x': is for commands, and there is none"),
        ({"keep_failed": "x", "command": [], "agent": [AGENT]}, "--keep-failed='x': is for commands, and there is"),
    ],
)
def test_variables_and_limits_that_cannot_be_are_refused(given: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        agents_of(options(**{"command": ["true"]} | given))


@pytest.mark.parametrize("wrong", [["--tasks", "0"], ["--tasks", "-1"], ["--slots", "0"]])
def test_numbers_below_one_are_refused(capsys: Capture, monkeypatch: pytest.MonkeyPatch, wrong: list[str]) -> None:
    monkeypatch.setenv("SEAMLESS_RUNNER_KEY", "mine")
    assert main(["runner", "--connect", "http://127.0.0.1:9", "--command", "true", *wrong]) == 2
    assert f"{wrong[0]}={wrong[1]}: must be at least 1" in capsys.readouterr().err


def test_address_and_key_are_those_of_the_file_unless_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal.admin.json"
    AdminFile("http://h:1", "k", "r", "another-host", 1).write(path)
    monkeypatch.delenv("SEAMLESS_RUNNER_KEY", raising=False)
    assert place_of(options(admin_file=str(path))) == ("http://h:1", "r")
    monkeypatch.setenv("SEAMLESS_RUNNER_KEY", "mine")
    assert place_of(options(admin_file=str(path), connect="https://proxy")) == ("https://proxy", "mine")
    monkeypatch.delenv("SEAMLESS_RUNNER_KEY")
    absent = str(tmp_path / "no")
    for wrong, said in (
        (options(), "--connect=None: is missing"),
        (options(connect="http://h:1"), "SEAMLESS_RUNNER_KEY=None: is not set"),
        (options(admin_file=absent), f"--admin-file='{absent}': cannot be read"),
    ):
        with pytest.raises(ConfigError, match=said):
            place_of(wrong)
    monkeypatch.setenv("SEAMLESS_RUNNER_KEY", "")
    with pytest.raises(ConfigError, match="SEAMLESS_RUNNER_KEY='': is empty"):
        place_of(options(connect="http://h:1"))


@pytest.mark.parametrize("key", ["secret\r", "secr\u00e9t", "secret "])
def test_a_key_that_no_header_can_carry_is_refused_unseen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    path = tmp_path / "journal.admin.json"
    AdminFile("http://h:1", "k", key, "another-host", 1).write(path)
    monkeypatch.delenv("SEAMLESS_RUNNER_KEY", raising=False)
    with pytest.raises(ConfigError, match=f"--admin-file='<{len(key)} characters>': its character") as raised:
        place_of(options(admin_file=str(path)))
    monkeypatch.setenv("SEAMLESS_RUNNER_KEY", key)
    with pytest.raises(ConfigError, match=f"SEAMLESS_RUNNER_KEY='<{len(key)} characters>': its character") as given:
        place_of(options(connect="http://h:1"))
    assert "secr" not in f"{raised.value} {given.value}"


def test_a_run_that_cannot_be_reached_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of all slots together; and one that had no tasks gives none back."""
    monkeypatch.setenv("SEAMLESS_RUNNER_KEY", "mine")
    pauses = itertools.count(1)

    def pause(shortest: float, longest: float) -> float:
        if next(pauses) == 60:  # each slot has tried several times
            os.kill(os.getpid(), signal.SIGINT)
        return 0.01

    monkeypatch.setattr("seamless_verl.client.connection.random.uniform", pause)
    with caplog.at_level(logging.INFO, logger="seamless_verl"):
        assert main(["runner", "--connect", "http://127.0.0.1:9", "--slots", "8", "--command", "true"]) == 0
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("seamless_verl.client")]
    assert "asks http://127.0.0.1:9 for tasks of default, 8 at a time" in caplog.messages
    assert len(lines) == 2 and lines[0].startswith("http://127.0.0.1:9 cannot be reached, tried 3 times")
    assert lines[1] == "stopped; it had no tasks"


@pytest.mark.parametrize(
    ("address", "options", "said"),
    [
        ("http://h:1", [], "--agent=None: is missing"),
        (
            "http://HOST:PORT",
            ["--command", "true"],
            "--connect='http://HOST:PORT': is no http address: Invalid port: 'PORT'. Write it as http://host:port",
        ),
    ],
)
def test_mistakes_are_one_line(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, address: str, options: list[str], said: str
) -> None:
    monkeypatch.setenv("SEAMLESS_RUNNER_KEY", "mine")
    assert main(["runner", "--connect", address, *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"seamless-verl: {said}")
