"""Which run of an earlier comparison is taken again, and which output folders are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.comparison import comparison, frontier

from seamless_verl.errors import ConfigError
from seamless_verl.tools.compare.device_use import UseSample
from seamless_verl.tools.compare.store import SURROUNDINGS, StoredRun, output_folder, read_run, write_report, write_run

IDENTITY: dict[str, Any] = {"command": ["run.sh", "a=1"], "fingerprint": {"config": "x", "versions": {"verl": "1"}}}


def test_a_run_is_taken_again_only_where_its_command_and_all_that_it_is_made_of_are_the_same(tmp_path: Path) -> None:
    assert read_run(tmp_path, IDENTITY) is None
    seen = [UseSample(0.0, 0.5, (1.0, 0.5))]
    run = StoredRun([{"step": 1, "at": 0.5, "data": {}}], seen, {"began": 5.0, "ended": 6.0})
    write_run(tmp_path, IDENTITY, run)
    assert read_run(tmp_path, IDENTITY) == run
    assert read_run(tmp_path, IDENTITY | {"command": ["run.sh", "a=2"]}) is None
    assert read_run(tmp_path, IDENTITY | {"fingerprint": {"config": "y", "versions": {"verl": "1"}}}) is None
    assert read_run(tmp_path, IDENTITY | {"fingerprint": {"config": "x", "versions": {"verl": "2"}}}) is None
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


def test_the_tables_have_what_the_frontier_is_made_of(tmp_path: Path) -> None:
    from pyarrow import parquet

    write_report(tmp_path, frontier(), {})
    runs = {(row["arm"], row["seed"]): row for row in parquet.read_table(tmp_path / "runs.parquet").to_pylist()}
    fallen, other = runs["seamless s=4", 2], runs["colocate_async", 1]
    assert (fallen["permitted"], fallen["collapsed"], fallen["seconds_to_target"]) == (4, True, 6.0)
    assert (fallen["training_s_to_target"], fallen["training_s"], fallen["training_tokens_per_s"]) == (6.0, 10.0, 512.0)
    assert (fallen["length_drawn"], fallen["length_p"], other["length_p"]) == (40, 1.0, None)
    assert (other["permitted"], other["collapsed"], other["target_reward"]) == (None, False, fallen["target_reward"])
    samples = parquet.read_table(tmp_path / "lengths.parquet").to_pylist()
    assert len(samples) == 4 * 24 * 2 and sum(row["trained"] for row in samples) == 4 * 40


def test_a_comparison_of_which_no_arm_recorded_lengths_has_an_empty_table_of_them(tmp_path: Path) -> None:
    from pyarrow import parquet

    write_report(tmp_path, comparison(), {})
    assert parquet.read_table(tmp_path / "lengths.parquet").num_rows == 0
