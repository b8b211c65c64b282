"""The file by which programs find a run: only its owner reads it, and one that a killed run left is recognized."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from socket import gethostname

import pytest

from seamless_verl.client.admin_file import AdminFile, kept_runner_key, remove_stale
from seamless_verl.errors import ConfigError
from seamless_verl.runtime.locks import only_writer


def admin_file(host: str = "") -> AdminFile:
    return AdminFile("http://127.0.0.1:80", "k", "r", host or gethostname(), os.getpid())


def test_it_is_its_owners_only_and_replaces_an_old_one(tmp_path: Path) -> None:
    path = tmp_path / "journal.admin.json"
    path.write_text("an old one")
    path.chmod(0o644)
    with path.open() as old:
        admin_file().write(path)
        assert old.read() == "an old one", "it was written into, not replaced"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path], "a temporary file is left"


def test_one_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError("read only")

    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(OSError, match="read only"):
        admin_file().write(tmp_path / "journal.admin.json")
    assert not list(tmp_path.iterdir())


def test_one_of_a_run_that_has_ended_is_recognized(tmp_path: Path) -> None:
    journal = tmp_path / "journal.sqlite"
    path = AdminFile.beside(journal)
    admin_file().write(path)
    with only_writer(journal):
        assert AdminFile.read(path) == admin_file() and not remove_stale(path)
    with pytest.raises(ConfigError, match="the run that wrote it has ended"):
        AdminFile.read(path)
    assert remove_stale(path) and not path.exists() and not remove_stale(path)
    admin_file("another-host").write(path)
    assert AdminFile.read(path).host == "another-host" and not remove_stale(path), "its locks are not seen here"


def test_one_that_is_linked_or_copied_from_beside_its_journal_is_not_taken_for_a_dead_runs(tmp_path: Path) -> None:
    journal, link, copy = tmp_path / "run" / "journal.sqlite", tmp_path / "link", tmp_path / "j.admin.json"
    with only_writer(journal):
        path = AdminFile.beside(journal)
        admin_file().write(path)
        link.symlink_to(path)
        copy.write_bytes(path.read_bytes())
        assert AdminFile.read(link) == AdminFile.read(copy) == admin_file()
    with pytest.raises(ConfigError, match="the run that wrote it has ended"):
        AdminFile.read(link)
    assert AdminFile.read(copy) == admin_file(), "whether its run lives does not show"


@pytest.mark.parametrize("content", [None, "{}", "not json"])
def test_what_is_no_such_file_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "f.admin.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match="file="):
        AdminFile.read(path)


def test_runners_keep_the_key_of_the_first_start(tmp_path: Path) -> None:
    journal = tmp_path / "journal.sqlite"
    assert kept_runner_key(journal, "") == "" and not list(tmp_path.iterdir())
    assert [kept_runner_key(journal, key) for key in ("first", "second")] == ["first", "first"]
    (kept,) = tmp_path.iterdir()
    assert kept.stat().st_mode & 0o777 == 0o600
