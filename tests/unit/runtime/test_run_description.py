"""What a run says of itself: written whole, and read where it is one."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from seamless_verl.runtime.files import RunDescription

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
