"""Files that are written whole: text, JSON lines that a resumed run continues, and what a run says of itself."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from seamless_verl.runtime.files import JsonLines, RunDescription, write_atomically


def test_text_replaces_what_was_there_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    for text in ("one", "ünï"):
        write_atomically(tmp_path / "f", text)
        assert (tmp_path / "f").read_text(encoding="utf-8") == text
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_lines_are_appended_and_half_a_line_is_none(tmp_path: Path) -> None:
    file = JsonLines(tmp_path / "new" / "f.jsonl")
    assert file.rows() == file.lines() == []
    file.add({"step": 1, "value": "ü"})
    file.add({"step": 2})
    with file.path.open("a") as partly:
        partly.write('{"step": 3, "va')
    assert file.rows() == [{"step": 1, "value": "ü"}, {"step": 2}]


def test_a_resumed_run_keeps_what_its_checkpoint_has(tmp_path: Path) -> None:
    file = JsonLines(tmp_path / "f.jsonl")
    file.resume_at(1)
    assert not file.path.exists()
    for step in (0, 1, 3, 2):
        file.add({"step": step})
    with file.path.open("a") as partly:
        partly.write('{"step": 2')
    file.resume_at(2)
    assert [row["step"] for row in file.rows()] == [0, 1, 2] and file.path.read_text().endswith("}\n")
    before = file.path.stat().st_ino
    file.resume_at(2)
    assert file.path.stat().st_ino == before, "what is right is not written again"


def test_a_run_from_nothing_keeps_nothing(tmp_path: Path) -> None:
    file = JsonLines(tmp_path / "f.jsonl")
    file.add({"step": 0})
    file.resume_at(0)
    assert file.rows() == [] and file.path.exists()


RUN = RunDescription("p/e", 12.5, "colocated", "/models/m", ("/runs/trajectories.sqlite",), 1)


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert RunDescription.read(tmp_path / "run") is None
    RUN.write(tmp_path / "run")
    assert RunDescription.read(tmp_path / "run") == RUN
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["run.json"]


@pytest.mark.parametrize("text", ["", "{", '{"name": 3}', "[]"])
def test_another_programs_file_is_no_description(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    assert RunDescription.read(tmp_path) is None


def test_a_disk_that_cannot_be_written_only_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way of the folder")
    with caplog.at_level(logging.WARNING):
        RUN.write(tmp_path / "file" / "run")
    (message,) = caplog.messages
    assert "not written, so a view knows less of this run" in message
