"""What tells a run from another one of the same command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from seamless_verl.tools.compare.fingerprint import config_hash, fingerprint
from seamless_verl.tools.compare.job import Job

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
    monkeypatch.setattr("seamless_verl.tools.compare.fingerprint.code_state", dict)  # which takes git
    for name in ("run.sh", "reward.py"):
        (tmp_path / name).write_text("1")
    (tmp_path / "out").mkdir()
    job = Job("sums", tmp_path / "run.sh", None, (), tmp_path)
    first = fingerprint(CONFIG, job)
    assert set(first["files"]) == {"run.sh", "reward.py"} and fingerprint(CONFIG, job) == first
    (tmp_path / "reward.py").write_text("2")
    assert fingerprint(CONFIG, job) != first
