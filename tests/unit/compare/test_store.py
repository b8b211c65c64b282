"""Which run of an earlier comparison is taken again, and which output folders are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from seamless_verl.compare.device_use import UseSample
from seamless_verl.compare.store import SURROUNDINGS, StoredRun, output_folder, read_run, write_run
from seamless_verl.errors import ConfigError

IDENTITY: dict[str, Any] = {"command": ["run.sh", "a=1"], "made_of": {"config": "x", "versions": {"verl": "1"}}}


def test_a_run_is_taken_again_only_where_its_command_and_all_that_it_is_made_of_are_the_same(tmp_path: Path) -> None:
    assert read_run(tmp_path, IDENTITY) is None
    seen = [UseSample(0.0, 0.5, (1.0, 0.5))]
    run = StoredRun([{"step": 1, "at": 0.5, "data": {}}], seen, {"began": 5.0, "ended": 6.0})
    write_run(tmp_path, IDENTITY, run)
    assert read_run(tmp_path, IDENTITY) == run
    assert read_run(tmp_path, IDENTITY | {"command": ["run.sh", "a=2"]}) is None
    assert read_run(tmp_path, IDENTITY | {"made_of": {"config": "y", "versions": {"verl": "1"}}}) is None
    assert read_run(tmp_path, IDENTITY | {"made_of": {"config": "x", "versions": {"verl": "2"}}}) is None
    (tmp_path / SURROUNDINGS).unlink()
    assert read_run(tmp_path, IDENTITY) is None, "its report could not say where it was made"


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/x"])
def test_an_output_folder_that_cannot_be_made_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--out="), output_folder(tmp_path / place):
        pass


def test_one_that_can_is_made(tmp_path: Path) -> None:
    with output_folder(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b").is_dir()
