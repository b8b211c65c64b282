"""A queue that the staleness bound may fill is a warning, before a run of hours ends on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.config import plain, tiny_run

from seamless_verl.config.checks.queue import SIZE, check_queue_room
from seamless_verl.config.settings import Settings


def settings(folder: Path, *, size: Any, backend: str = "SimpleStorage", mode: str = "seamless") -> Settings:
    """16 prompts of 8 samples a step, and two versions permitted: 144 rows a step, 592 in all."""
    tree = plain(tiny_run(folder))
    tree["data"]["train_batch_size"], tree["actor_rollout_ref"]["rollout"]["n"] = 16, 8
    tree["trainer"]["v1"]["trainer_mode"] = mode
    tree["seamless"] = {"max_staleness": 2}
    tree["transfer_queue"] = {"backend": {"storage_backend": backend, "SimpleStorage": {"total_storage_size": size}}}
    return Settings.of(tree, devices=None, accelerator=False)


def test_what_does_not_fit_is_a_warning_with_the_way_out(tmp_path: Path) -> None:
    (problem,) = check_queue_room(settings(tmp_path, size=591))
    assert problem.warning and problem.key == SIZE
    assert "4 steps and the next prompts may have 592 rows" in problem.reason
    assert problem.way_out == f"Set {SIZE}=null, or 1184"


@pytest.mark.parametrize(
    "changed",
    [{"size": 592}, {"size": None}, {"size": 1, "backend": "MooncakeStore"}, {"size": 1, "mode": "separate_async"}],
)
def test_it_is_silent_where_all_fit_and_where_it_knows_no_bound(tmp_path: Path, changed: dict[str, Any]) -> None:
    assert check_queue_room(settings(tmp_path, **changed)) == []
