"""A user's mistake is reported in one line with the key, the value and the way out; the exit code is 2."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from support.cli import Capture, error_line, journal_file
from support.journal import open_journal, session_opened, write

from seamless_verl.cli.main import COMMANDS, main, make_parser
from seamless_verl.journal import JournalReader


def test_what_is_no_journal(tmp_path: Path, capsys: Capture) -> None:
    text, empty, other = tmp_path / "text", tmp_path / "empty", tmp_path / "other"
    text.write_text("no database " * 100)
    empty.touch()
    with sqlite3.connect(other) as db:
        db.execute("CREATE TABLE mine (x)")
    db.close()
    for path in (text, empty, other):
        message = error_line(capsys, "ls", str(path))
        assert f"JOURNAL='{path}'" in message and "cannot be read as a journal" in message
        assert message.endswith("trajectories.sqlite beside its checkpoints, or seamless.gateway.journal")
    missing = tmp_path / "missing"
    message = error_line(capsys, "show", str(missing), "s")
    assert f"JOURNAL='{missing}': there is no such file" in message
    assert message.endswith("A run without seamless.gateway.enabled=true has none")
    assert not missing.exists()


def test_a_folder_is_no_journal_and_the_journals_in_it_are_named(tmp_path: Path, capsys: Capture) -> None:
    message = error_line(capsys, "ls", str(tmp_path))
    assert (
        f"JOURNAL='{tmp_path}': it is a folder, and a journal is one file. Give the file that a run writes" in message
    )
    (tmp_path / "run").mkdir()
    for path in (tmp_path / "run" / "trajectories.sqlite", tmp_path / "trajectories.sqlite"):
        path.touch()
        assert str(path) in error_line(capsys, "ls", str(tmp_path))


def test_a_newer_schema(tmp_path: Path, capsys: Capture) -> None:
    path = journal_file(tmp_path)
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version=99")
    db.close()
    message = error_line(capsys, "export", path, "--out", str(tmp_path / "out"))
    assert (
        f"journal='{path}'" in message and "its format is 99" in message and "Use the release that wrote it" in message
    )


def test_sessions_that_are_not_one(tmp_path: Path, capsys: Capture) -> None:
    path = journal_file(tmp_path)
    unknown = error_line(capsys, "show", path, "zz")
    assert "SESSION='zz'" in unknown and f"trajectories ls {path}" in unknown
    assert "SESSION='aa': 2 sessions begin so. Give more of the id: aaa1, aab2" in error_line(
        capsys, "show", path, "aa"
    )


def test_not_all_of_many_ambiguous_sessions_are_named(tmp_path: Path, capsys: Capture) -> None:
    with open_journal(tmp_path) as journal:
        write(journal, *(session_opened(f"s{number}") for number in range(9)))
        message = error_line(capsys, "show", str(journal.path), "s")
    assert message.endswith("9 sessions begin so. Give more of the id: s0, s1, s2, s3, s4 and 4 more")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nope", "policy='nope': there is no such staleness policy. Choose one of"),
        ("nope:1", "policy='nope': there is no such staleness policy. Choose one of"),
        ("mask_older_than:x", "--policy='mask_older_than:x': 'x' is no bound. Give a whole number"),
        ("mask_older_than:-1", "--policy='mask_older_than:-1': '-1' is no bound. Give a whole number"),
        ("train_all:2", "--policy='train_all:2': train_all takes no bound. Give train_all alone"),
    ],
)
def test_policies(tmp_path: Path, capsys: Capture, text: str, message: str) -> None:
    path = journal_file(tmp_path)
    assert message in error_line(capsys, "show", path, "aaa1", "--policy", text)
    assert message in error_line(capsys, "export", path, "--out", str(tmp_path / "out"), "--policy", text)


def test_options(tmp_path: Path, capsys: Capture) -> None:
    path, model = journal_file(tmp_path), str(tmp_path / "model")
    assert "--limit=0" in error_line(capsys, "ls", path, "--limit", "0")
    assert "--stage: invalid choice: 'ended' (choose from 'open'" in error_line(capsys, "ls", path, "--stage", "ended")
    assert "--version: invalid int value: 'new'" in error_line(capsys, "show", path, "aaa1", "--version", "new")
    assert "Add --model PATH" in error_line(capsys, "show", path, "aaa1", "--text")
    assert f"--model='{model}': there is no such folder" in error_line(capsys, "show", path, "aaa1", "--model", model)
    assert "the following arguments are required: COMMAND" in error_line(capsys)


@pytest.mark.parametrize("end", ["", "-wal", "-shm", "-lock"])
def test_an_export_never_replaces_the_journal(tmp_path: Path, capsys: Capture, end: str) -> None:
    path = journal_file(tmp_path)
    (tmp_path / "link").symlink_to(path)
    for name in (path + end, *([str(tmp_path / "link")] if not end else [])):
        assert "it is the journal itself" in error_line(capsys, "export", path, "--out", name)
    assert len(JournalReader(Path(path)).sessions()) == 3


def test_places_that_cannot_be_written(tmp_path: Path, capsys: Capture) -> None:
    path, folder = journal_file(tmp_path), tmp_path / "folder"
    folder.mkdir()
    nowhere = str(tmp_path / "no" / "out")
    assert f"--out='{nowhere}': there is no folder" in error_line(capsys, "export", path, "--out", nowhere)
    assert "it is a folder. Give a file" in error_line(capsys, "export", path, "--out", str(folder))
    kept = error_line(capsys, "export", path, "--out", str(folder), "--format", "datasets")
    assert "it exists" in kept and folder.is_dir()
    long = str(tmp_path / ("x" * 250))
    assert f"--out='{long}': File name too long" in error_line(capsys, "export", path, "--out", long)


def test_the_help_is_the_same_with_and_without_the_commands_modules(capsys: Capture) -> None:
    assert make_parser("").format_help() == make_parser("runner").format_help() == make_parser().format_help()
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert all(f"{name} {about}" in shown for name, about in COMMANDS.items())
    with pytest.raises(SystemExit):
        main(["plans"])
    assert "invalid choice: 'plans' (choose from 'check', 'doctor', 'plan'" in capsys.readouterr().err
