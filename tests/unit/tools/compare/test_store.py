"""Which run of an earlier comparison is taken again, which output folders are refused, and what the tables have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.comparison import comparison, frontier

from seamless_verl.errors import ConfigError
from seamless_verl.tools.compare.job import Job
from seamless_verl.tools.compare.machine import UseSample
from seamless_verl.tools.compare.store import (
    SURROUNDINGS,
    StoredRun,
    config_hash,
    fingerprint,
    output_folder,
    read_run,
    write_report,
    write_run,
)

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

    write_report(tmp_path, frontier(), {}, {})
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

    write_report(tmp_path, comparison(), {}, {})
    assert parquet.read_table(tmp_path / "lengths.parquet").num_rows == 0


CONFIG = {
    "trainer": {"default_local_dir": "/out/probes/sync", "experiment_name": "12:00", "device": "cpu"},
    "data": {"seed": 1, "train_files": "/a.parquet"},
}


def test_any_setting_of_the_composed_config_counts_but_its_places_and_its_seed() -> None:
    places = {"trainer": {"default_local_dir": "/other", "experiment_name": "12:01", "device": "cpu"}}
    assert config_hash({"data": {"train_files": "/a.parquet", "seed": 2}, **places}) == config_hash(CONFIG)
    assert config_hash({**CONFIG, "data": {"seed": 1, "train_files": "/b.parquet"}}) != config_hash(CONFIG)
    assert CONFIG["data"]["seed"] == 1, "it is left as it was"


def test_each_file_beside_a_recipes_script_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seamless_verl.tools.compare.store.code_state", dict)  # which takes git
    for name in ("run.sh", "reward.py"):
        (tmp_path / name).write_text("1")
    (tmp_path / "out").mkdir()
    job = Job("sums", tmp_path / "run.sh", None, (), tmp_path)
    first = fingerprint(CONFIG, job)
    assert set(first["files"]) == {"run.sh", "reward.py"} and fingerprint(CONFIG, job) == first
    (tmp_path / "reward.py").write_text("2")
    assert fingerprint(CONFIG, job) != first
