"""The command `view` refuses what it cannot show, and ports at which it cannot listen."""

from __future__ import annotations

import socket
import sqlite3
from pathlib import Path

import pytest
from support.cli import Capture
from support.view import JOURNAL, make_run

from seamless_verl.cli.main import main
from seamless_verl.journal import SqliteJournal


def error_of(capsys: Capture, *argv: str) -> str:
    assert main(["view", *argv]) == 2
    out = capsys.readouterr()
    assert out.out == ""
    (line,) = out.err.splitlines()
    return line


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: Capture) -> None:
    assert f"FOLDER='{tmp_path}': it has no run" in error_of(capsys, str(tmp_path))
    assert "there is no such folder" in error_of(capsys, str(tmp_path / "nowhere"))


def test_a_journal_of_a_later_release_is_refused(tmp_path: Path, capsys: Capture) -> None:
    with SqliteJournal(tmp_path / JOURNAL):
        pass
    with sqlite3.connect(tmp_path / JOURNAL) as db:
        db.execute("PRAGMA user_version=99")
    line = error_of(capsys, str(tmp_path))
    assert "its format is 99, this release knows" in line and "Use the release that wrote it" in line


def test_what_is_no_journal_is_refused(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / JOURNAL).write_text("no database")
    assert "its journal cannot be read" in error_of(capsys, str(tmp_path))


def test_a_port_that_is_taken_is_refused(tmp_path: Path, capsys: Capture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = error_of(capsys, str(make_run(tmp_path)), "--port", str(port))
    assert f"--port={port}: cannot be listened to at 127.0.0.1" in line and "0 for any that is free" in line


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [("--port", "65536", "is not between 0 and 65535"), ("--host", "203.0.113.7", "cannot be listened to")],
)
def test_addresses_that_cannot_be(tmp_path: Path, capsys: Capture, option: str, value: str, said: str) -> None:
    assert said in error_of(capsys, str(make_run(tmp_path)), option, value)


def test_a_model_that_is_not_there_is_refused(tmp_path: Path, capsys: Capture) -> None:
    line = error_of(capsys, str(make_run(tmp_path)), "--model", "nowhere")
    assert "--model='nowhere': there is no such folder" in line
