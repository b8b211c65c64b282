"""Agents and gateway: loops, port, journal and options that cannot work are refused before a run starts."""

from __future__ import annotations

import errno
import os
import socket
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

import pytest
import yaml
from support.config import assert_refused, refused, tiny_plain

from seamless_verl.config import preflight
from seamless_verl.journal import SqliteJournal

AGENT = "actor_rollout_ref.rollout.agent"
LOOPS, DEFAULT = f"{AGENT}.agent_loop_config_path", f"{AGENT}.default_agent_loop"
GATEWAY = "seamless.gateway"
ON = f"{GATEWAY}.enabled=true"
OURS = "seamless_verl.agent_loops.loops"
CALLABLE, COMMAND = f"{OURS}.CallableAgentLoop", f"{OURS}.CommandAgentLoop"


def loops(folder: Path, *entries: object) -> str:
    (folder / "loops.yaml").write_text(yaml.safe_dump(list(entries)))
    return f"{LOOPS}={folder / 'loops.yaml'}"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With an agent in it; also the working directory."""
    (tmp_path / "agent.py").write_text("async def run(task, endpoint): ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    "entry",
    [
        {"_target_": CALLABLE, "agent": "agent.py:run", "time_limit_s": 0.5, "failure_reward": None},
        {"_target_": CALLABLE, "agent": "agent:run"},
        {"_target_": COMMAND, "command": "true", "folder": ".", "env": {"A": "1"}},
        {"_target_": COMMAND, "command": ["python", "agent.py"]},
        {"_target_": COMMAND, "command": ["sleep", 1], "limits": {"cpu_s": 30, "file_bytes": 10485760, "grace_s": 0}},
        {
            **{"_target_": CALLABLE, "agent": "agent.py:run", "sampling": {"min_p": 0.02, "seed": 7}},
            "session": {"max_turns": 20, "max_tokens": 8192, "max_concurrent": 4},
        },
        {"_target_": "agent.run", "anything": 1},
    ],
)
def test_loops_that_pass(folder: Path, entry: dict[str, object]) -> None:
    config = tiny_plain(folder, ON, loops(folder, {"name": "mine", **entry}), f"{DEFAULT}=mine")
    assert preflight(config, devices=1, accelerator=False) == []


@pytest.mark.parametrize(
    ("entry", "field", "way_out"),
    [
        ({"_target_": CALLABLE, "agent": "agnet.py:run"}, "agent", "Did you mean agent.py? Paths are taken from"),
        ({"_target_": CALLABLE, "agent": "agent.py:rum"}, "agent", "Did you mean run?"),
        ({"_target_": CALLABLE, "agent": "agent:rum"}, "agent", "Did you mean run?"),
        ({"_target_": CALLABLE, "agent": "nosuch.module:run"}, "agent", "PYTHONPATH"),
        ({"_target_": CALLABLE, "agent": "agent.py"}, "agent", "path/to/file.py:name"),
        ({"_target_": CALLABLE}, "agent", "path/to/file.py:name"),
        ({"_target_": CALLABLE, "agent": "agent.py:run", "time_limit": 3}, "time_limit", "Did you mean time_limit_s?"),
        ({"_target_": CALLABLE, "agent": "agent.py:run", "time_limit_s": 0}, "time_limit_s", "time_limit_s=600"),
        ({"_target_": COMMAND, "command": "true", "folder": "nosuch"}, "folder", "working directory"),
        ({"_target_": COMMAND, "command": []}, "command", "[python, agent.py]"),
        ({"_target_": COMMAND, "command": "echo '{task}'"}, "command", "Put the field outside"),
        (
            {"_target_": COMMAND, "command": "true", "session": 3},
            "session",
            "Valid: max_turns, max_tokens",
        ),
        (
            {"_target_": CALLABLE, "agent": "agent.py:run", "limits": {"cpu_s": 3}},
            "limits",
            "Did you mean time_limit_s?",
        ),
        ({"_target_": CALLABLE, "agent": "agent.py:run", "failure_reward": "no"}, "failure_reward", "or null"),
        ({"_target_": f"{OURS}.CallableAgent", "agent": "agent.py:run"}, "_target_", "Did you mean CallableAgentLoop?"),
        ({"_target_": "nosuch.Loop"}, "_target_", "Install it"),
        ({"_target_": "agent"}, "_target_", "agent.<name>"),
        ({}, "_target_", "`name` and `_target_`"),
    ],
)
def test_loops_that_do_not(folder: Path, entry: dict[str, object], field: str, way_out: str) -> None:
    config = tiny_plain(folder, ON, loops(folder, {"name": "mine", **entry}))
    assert_refused(config, f"{LOOPS}[0].{field}", entry.get(field), way_out)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def run(task): return 1", "run(task) takes 1 argument, and 2 are given: task and endpoint"),
        ("async def run(): return 1", "run() takes no arguments, and"),
        ("def run(task=None): return 1", "run(task=None) takes at most 1 argument, and"),
        ("def run(a, b, c): return 1", "run(a, b, c) takes 3 arguments, and"),
        ("def run(a, b, c, d=1): return 1", "takes at least 3 arguments, and"),
        ("def run(task, endpoint, *, model): return 1", "needs model by name, and"),
        ("def run(task, endpoint): ...\ndef run(task): ...", "takes 1 argument, and"),
        ("def run(task, endpoint, more=1, *, other=2): return 1", None),
        ("def run(*all): return 1", None),
        ("def run(task, *all, **named): return 1", None),
        ("from os import path as run", None),
        ("def wrap(f): ...\n@wrap\ndef run(task): return 1", None),
        ("def run(task): ...\nrun = print", None),
        ("class run:\n    def __init__(self): ...", None),
    ],
)
def test_what_an_agent_is_called_with(folder: Path, source: str, said: str | None) -> None:
    (folder / "other_agent.py").write_text(source)
    for place in ("other_agent.py", "other_agent"):
        entry = {"name": "mine", "_target_": CALLABLE, "agent": f"{place}:run"}
        config = tiny_plain(folder, ON, loops(folder, entry), f"{DEFAULT}=mine")
        if said is None:
            assert preflight(config, devices=1, accelerator=False) == []
        else:
            assert_refused(config, f"{LOOPS}[0].agent", f"{place}:run", "Write it as run(task, endpoint)")
            assert said in refused(config)[0].reason


def test_two_entries_with_one_name(folder: Path) -> None:
    entry = {"name": "mine", "_target_": CALLABLE, "agent": "agent.py:run"}
    (problem,) = refused(tiny_plain(folder, ON, loops(folder, entry, {**entry, "name": "other"}, entry)))
    assert (problem.key, problem.value) == (f"{LOOPS}[2].name", "mine") and "its own name" in problem.way_out


def test_an_entry_may_name_a_variable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"name": "mine", "_target_": CALLABLE, "agent": "${oc.env:RECIPE}/agent.py:run"}
    config = tiny_plain(folder, ON, loops(folder, entry), f"{DEFAULT}=mine")
    monkeypatch.setenv("RECIPE", str(folder))
    assert preflight(config, devices=1, accelerator=False) == []
    monkeypatch.setenv("RECIPE", "/nosuch")
    assert_refused(config, f"{LOOPS}[0].agent", "/nosuch/agent.py:run", "Paths are taken from")
    monkeypatch.delenv("RECIPE")
    (problem,) = refused(config)
    assert problem.key == LOOPS and "RECIPE" in str(problem) and "Set the variable" in str(problem)


def test_each_mistake_of_each_entry_is_reported(folder: Path) -> None:
    bad = {"name": "a", "_target_": COMMAND, "command": ""}
    good = {"name": "b", "_target_": COMMAND, "command": "true"}
    problems = refused(tiny_plain(folder, ON, loops(folder, bad, good, {"_target_": COMMAND})))
    assert [problem.key for problem in problems] == [f"{LOOPS}[0].command", f"{LOOPS}[2].name", f"{LOOPS}[2].command"]
    session, sampling = {"max_turns": 0, "max_token": 5}, {"min_p": 2, "temperature": 0.5, "seed": "x"}
    limits = {"cpu_s": 0.5, "wall_s": 3, "file_bytes": -1}
    many = {"name": "a", "_target_": COMMAND, "command": "true", "session": session, "limits": limits}
    problems = refused(tiny_plain(folder, ON, loops(folder, many | {"sampling": sampling, "env": {"A": 1}})))
    assert [problem.key.removeprefix(f"{LOOPS}[0].") for problem in problems] == [
        *("sampling.temperature", "limits.wall_s", "session.max_token", "session.max_turns"),
        *("sampling.min_p", "sampling.seed", "env", "limits.cpu_s", "limits.file_bytes"),
    ]


@pytest.mark.parametrize(
    ("entry", "keys"),
    [
        ({"_target_": CALLABLE, "agent": "agnet.py:run", "time_limit_s": 0}, ["time_limit_s", "agent"]),
        ({"_target_": CALLABLE, "agent": "agnet.py:run", "sampling": {"top_p": 1}}, ["sampling.top_p", "agent"]),
        ({"_target_": CALLABLE, "agent": 3, "time_limit_s": 0}, ["time_limit_s", "agent"]),
        ({"_target_": CALLABLE, "time_limit_s": 0}, ["time_limit_s", "agent"]),
        ({"_target_": COMMAND, "command": "echo '{task}'", "folder": "nosuch"}, ["folder", "command"]),
        ({"_target_": COMMAND, "command": "echo '{task}'", "folder": "nosuch", "x": 1}, ["x", "folder", "command"]),
        ({"_target_": COMMAND, "command": [], "folder": "nosuch"}, ["command"]),
    ],
)
def test_several_mistakes_of_one_entry(folder: Path, entry: dict[str, object], keys: list[str]) -> None:
    problems = refused(tiny_plain(folder, ON, loops(folder, {"name": "mine", **entry})))
    assert [problem.key.removeprefix(f"{LOOPS}[0].") for problem in problems] == keys


@pytest.mark.parametrize(
    ("text", "reason"), [("- {a: b", "is not YAML"), ("name: mine", "is not a list"), ("", "is not a list")]
)
def test_a_file_of_loops_that_is_none(folder: Path, text: str, reason: str) -> None:
    file = folder / "loops.yaml"
    file.write_text(text)
    (problem,) = refused(tiny_plain(folder, f"{LOOPS}={file}"))
    assert problem.key == LOOPS and problem.value == str(file) and reason in problem.reason


def test_a_file_of_loops_that_is_not_there(folder: Path) -> None:
    assert_refused(tiny_plain(folder, f"{LOOPS}=nosuch.yaml"), LOOPS, "nosuch.yaml", "YAML file of agent loops")
    assert_refused(tiny_plain(folder, f"{LOOPS}={folder}"), LOOPS, str(folder), "YAML file of agent loops")


def test_the_default_loop_has_a_name_that_is_known(folder: Path) -> None:
    named = loops(folder, {"name": "mine", "_target_": "agent.run"})
    for name, warnings in (("single_turn_agent", 1), ("tool_agent", 1), ("mine", 0)):
        config = tiny_plain(folder, named, f"{DEFAULT}={name}")
        assert len(preflight(config, devices=1, accelerator=False)) == warnings  # of `mine`, which nothing runs
    assert_refused(tiny_plain(folder, named, f"{DEFAULT}=mime"), DEFAULT, "mime", "Did you mean mine?")
    assert_refused(tiny_plain(folder, f"{DEFAULT}=mine"), DEFAULT, "mine", LOOPS)
    for own in (f"{AGENT}.agent_loop_manager_class=my.Manager", "actor_rollout_ref.model.external_lib=my.lib"):
        config = tiny_plain(folder, f"{DEFAULT}=mine", own)  # code of one's own may register it
        assert preflight(config, devices=1, accelerator=False) == []


def test_the_port(folder: Path) -> None:
    key = f"{GATEWAY}.port"
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        config = tiny_plain(folder, ON, f"{key}={port}")
        assert_refused(config, key, port, f"Set {key} to another one, or to 0")
        off = tiny_plain(folder, f"{key}={port}")
        cluster = tiny_plain(folder, ON, f"{key}={port}", "ray_kwargs.ray_init.address=10.0.0.1:6379")
        assert preflight(cluster, devices=1, accelerator=False) == []
        (unread,) = preflight(off, devices=1, accelerator=False)
        assert "is not read while seamless.gateway.enabled=false" in unread
    assert preflight(config, devices=1, accelerator=False) == []
    assert_refused(tiny_plain(folder, ON, f"{key}=65536"), key, 65536, "to 0 for any that is free")


def after_a_free_port() -> socket.socket:
    """Listens; the port before it is free."""
    while True:
        taken = socket.create_server(("", 0))
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("", taken.getsockname()[1] - 1))
            return taken
        taken.close()


def test_the_shards(folder: Path) -> None:
    key = f"{GATEWAY}.port"
    with after_a_free_port() as taken:
        before = taken.getsockname()[1] - 1
        (problem,) = refused(tiny_plain(folder, ON, f"{key}={before}", f"{GATEWAY}.shards=2"))
        assert problem.key == key and str(before + 1) in problem.reason
    assert_refused(tiny_plain(folder, ON, f"{key}=65534", f"{GATEWAY}.shards=3"), key, 65534, "to 0 for any")
    calls = tiny_plain(folder, f"{GATEWAY}.shards=3", "actor_rollout_ref.rollout.max_num_seqs=2")
    assert_refused(calls, f"{GATEWAY}.shards", 3, f"{GATEWAY}.shards=2 or less")
    (folder / "trajectories-1.sqlite").write_text("something else")
    config = tiny_plain(folder, ON, f"trainer.default_local_dir={folder}", f"{GATEWAY}.shards=2")
    assert_refused(config, "trainer.default_local_dir", str(folder), f"{GATEWAY}.journal")


def test_the_journal(folder: Path) -> None:
    key = f"{GATEWAY}.journal"
    (folder / "file").write_text("something else")
    (folder / "empty").touch()
    for good in ("new/folder/journal", "empty"):
        assert preflight(tiny_plain(folder, ON, f"{key}={good}"), devices=1, accelerator=False) == []
    assert not (folder / "new").exists()
    for bad, said in [(".", "is a folder"), ("file/journal", "no folder can be made"), ("file", "is no journal")]:
        (problem,) = refused(tiny_plain(folder, ON, f"{key}={bad}"))
        assert (problem.key, problem.value) == (key, bad) and said in problem.reason and key in problem.way_out


def test_a_file_system_without_locks_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("seamless_verl.runtime.locks.fcntl.flock", no_locks)
    problems = refused(tiny_plain(folder, ON, f"{GATEWAY}.journal=new/journal"))
    (problem,) = (one for one in problems if one.key == f"{GATEWAY}.journal")
    assert "No locks available" in problem.reason and "local disk" in problem.way_out
    assert list(folder.glob("*lock*")) == []


def test_a_journal_that_others_can_read_is_warned_of(folder: Path) -> None:
    path = folder / "own" / "journal.sqlite"
    SqliteJournal(path).close()
    config = tiny_plain(folder, ON, f"{GATEWAY}.journal={path}")
    assert preflight(config, devices=1, accelerator=False) == []
    path.chmod(0o640)
    (warning,) = preflight(config, devices=1, accelerator=False)
    assert "mode 640" in warning and f"chmod 600 {path}" in warning


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        ("PRAGMA user_version=99", "its format is 99"),
        ("PRAGMA application_id=7", "some other program"),
        ("INSERT INTO sessions VALUES (1, 's', 'u', x'c6', 0)", "a row that cannot be read"),
        (None, "journal.sqlite"),
    ],
)
def test_a_journal_that_cannot_be_continued_is_refused_and_not_changed(
    folder: Path, spoil: str | None, named: str
) -> None:
    own = folder / "own"
    path = own / "journal.sqlite"
    SqliteJournal(path).close()
    if spoil is None:
        path.write_bytes(path.read_bytes()[:8192])
    else:
        with closing(sqlite3.connect(path)) as db:
            db.execute(spoil)
            db.commit()
    before = {file.name: file.read_bytes() for file in own.iterdir()}
    (problem,) = refused(tiny_plain(folder, ON, f"{GATEWAY}.journal={path}"))
    assert problem.key == f"{GATEWAY}.journal" and named in problem.reason
    assert {file.name: file.read_bytes() for file in own.iterdir()} == before


def test_a_journal_that_may_not_be_written(folder: Path) -> None:
    """Not by root either, who may write where nothing can be made."""
    config = tiny_plain(folder, ON, f"{GATEWAY}.journal=/proc/journal")
    (problem,) = refused(config)
    assert problem.key == f"{GATEWAY}.journal" and "/proc cannot be written" in problem.reason


@pytest.mark.parametrize(
    ("option", "key"),
    [
        ("--port=8000", "seamless.gateway.port"),
        ("--max_model_len=100", "actor_rollout_ref.rollout.max_model_len"),
        ("--dtype=float32", "actor_rollout_ref.rollout.dtype"),
        ("--model=Qwen/Qwen3-4B", "actor_rollout_ref.model.path"),
    ],
)
def test_options_that_the_run_sets(folder: Path, option: str, key: str) -> None:
    config = tiny_plain(folder, ON, f"{GATEWAY}.options=[{option}]")
    assert_refused(config, f"{GATEWAY}.options", option, f"Set {key} for the run")


def test_a_parser_of_tool_calls_alone_reads_none(folder: Path) -> None:
    both = f'\'{GATEWAY}.options=["--enable-auto-tool-choice","--tool-call-parser=hermes"]\''
    for options in ("--tool-call-parser=hermes", "--tool_call_parser,hermes"):
        (warning,) = preflight(tiny_plain(folder, ON, f"{GATEWAY}.options=[{options}]"), devices=1, accelerator=False)
        assert warning.startswith(f"{GATEWAY}.options='--tool-call-parser=hermes': reads no tool calls")
        assert warning.endswith(f"Write {both}")
