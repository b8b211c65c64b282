"""A working folder is deleted as far as it can be; what cannot be deleted is logged and costs no session."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from seamless_verl.agents.scratch import Scratch


def test_files_of_another_user_are_logged_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """As a container that runs as root leaves them in a mounted folder: they can be neither deleted nor changed."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    scratch = Scratch.make()
    for name in ("home", "work", "work/theirs", "work/theirs/deep"):
        (scratch.root / name).mkdir()
    (scratch.work / "mine").touch()
    real_chmod, real_rmdir, real_islink = Path.chmod, os.rmdir, Path.is_symlink

    def chmod(path: Path, mode: int, **options: Any) -> None:
        if "theirs" in path.parts:
            raise PermissionError(1, "Operation not permitted", str(path))
        real_chmod(path, mode, **options)

    def is_symlink(path: Path) -> bool:
        if path.name == "deep":
            raise PermissionError(13, "Permission denied", str(path))
        return real_islink(path)

    def rmdir(path: Any, **options: Any) -> None:
        if str(path).endswith(("theirs", "deep")):
            raise PermissionError(13, "Permission denied", str(path))
        real_rmdir(path, **options)

    monkeypatch.setattr(Path, "chmod", chmod)
    monkeypatch.setattr(Path, "is_symlink", is_symlink)
    monkeypatch.setattr(os, "rmdir", rmdir)
    with caplog.at_level(logging.WARNING):
        scratch.remove()
    (record,) = caplog.records
    assert f"{scratch.root} could not be deleted completely" in record.getMessage()
    assert not (scratch.root / "home").exists() and not (scratch.work / "mine").exists()
    monkeypatch.undo()
    shutil.rmtree(scratch.root)


def test_a_working_folder_is_kept_under_a_name_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    said = []
    for text in ("one", "two"):
        scratch = Scratch.make()
        scratch.fill(None, text)
        said.append(scratch.keep_work(Path("failed"), "uid/0"))
        scratch.remove()
    kept = [Path(line.removeprefix("its working folder is kept: ")) for line in said]
    assert [(path / "task.json").read_text() for path in kept] == ["one", "two"]
    assert all(path.parent == tmp_path / "failed" and path.name.startswith("uid_0-") for path in kept)
    assert [path.name for path in tmp_path.iterdir()] == ["failed"]


def test_a_folder_that_cannot_be_kept_is_said_and_raises_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said = Scratch(tmp_path / "gone").keep_work(tmp_path / "file", "name")
    assert said.startswith(f"its working folder could not be kept as {tmp_path}/file/name-gone: ")
