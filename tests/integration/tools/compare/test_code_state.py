"""The state of a checkout's code, by which a run is told from one of another state."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from seamless_verl.tools.compare.machine import code_state

pytestmark = pytest.mark.integration


def git(folder: Path, *arguments: str) -> None:
    own = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(folder), *own, *arguments], check=True, capture_output=True)


def test_a_commit_and_a_change_of_the_code_count_and_other_changes_do_not(tmp_path: Path) -> None:
    assert code_state(tmp_path) == {}
    (tmp_path / "seamless_verl").mkdir()
    code, page = tmp_path / "seamless_verl" / "a.py", tmp_path / "README.md"
    for file in (code, page):
        file.write_text("1")
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    first = code_state(tmp_path)
    page.write_text("2")
    assert code_state(tmp_path) == first
    code.write_text("2")
    changed = code_state(tmp_path)
    assert changed["commit"] == first["commit"] and changed["changes"] != first["changes"]
    git(tmp_path, "commit", "-am", "second")
    assert code_state(tmp_path)["commit"] != first["commit"]
