"""Checkpoints of earlier starts are rotated with those of this one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from seamless_verl.trainer.checkpoints import (
    adopt,
    all_steps,
    earlier_steps,
    kept_checkpoints,
    kept_while_saving,
    loaded_from,
    prune,
)

pytestmark = pytest.mark.integration


def test_steps_up_to_the_loaded_one_are_found(tmp_path: Path) -> None:
    for name in ("global_step_4/actor", "global_step_20/actor", "global_step_30/actor", "global_step_8", "other/actor"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "global_step_x" / "actor").mkdir(parents=True)
    assert earlier_steps(tmp_path, 20) == [4, 20], "8 has no actor, 30 is of a run that went on from elsewhere"
    assert all_steps(tmp_path, 20) == [4, 8, 20] and all_steps(tmp_path, 3) == []
    assert earlier_steps(tmp_path / "missing", 20) == []


@pytest.mark.parametrize(
    ("trainer", "folder"),
    [
        ({"resume_mode": "auto", "default_local_dir": "/runs/mine"}, "/runs/mine"),
        ({"resume_mode": "resume_path", "resume_from_path": "/runs/other/global_step_5"}, "/runs/other"),
    ],
)
def test_another_runs_folder_is_known(trainer: dict[str, Any], folder: str) -> None:
    assert loaded_from(OmegaConf.create({"trainer": trainer})) == Path(folder)


@pytest.mark.parametrize("name", ["checkpoint_mananager", "checkpoint_manager"])
def test_the_oldest_go_first(name: str) -> None:
    manager = SimpleNamespace(previous_saved_paths=["now"])
    adopt(SimpleNamespace(**{name: manager}), ["old", "older"][::-1])
    assert manager.previous_saved_paths == ["older", "old", "now"]


@pytest.mark.parametrize(
    ("trainer", "kept"),
    [
        ({"max_actor_ckpt_to_keep": 1, "max_critic_ckpt_to_keep": None}, (1, None)),
        ({"max_actor_ckpt_to_keep": 3, "max_critic_ckpt_to_keep": 0}, (3, None)),
        ({"remove_previous_ckpt_in_save": True, "max_actor_ckpt_to_keep": None}, (1, 1)),
        ({}, (None, None)),
    ],
)
def test_how_many_a_run_keeps(trainer: dict[str, Any], kept: tuple[int | None, int | None]) -> None:
    assert tuple(kept_checkpoints(OmegaConf.create({"trainer": trainer})).values()) == kept


def test_a_save_leaves_the_checkpoint_before_it() -> None:
    engine = SimpleNamespace(checkpoint_manager=SimpleNamespace())
    assert [kept_while_saving(engine, keep) for keep in (1, 2, 5)] == [2, 2, 5]
    assert [kept_while_saving(engine, keep) for keep in (None, 0, -1)] == [None, 0, -1], "verl removes nothing"


def test_an_engine_that_saves_in_its_own_way_is_left_alone() -> None:
    engine = SimpleNamespace(checkpointer=SimpleNamespace())
    adopt(engine, ["old"])
    prune(engine, 1)
    assert kept_while_saving(engine, 1) == 1, "nothing would remove the second one"


def test_the_oldest_beyond_the_bound_are_removed() -> None:
    removed: list[str] = []
    manager = SimpleNamespace(previous_saved_paths=["a", "b", "c"], remove_previous_save_local_path=removed.extend)
    engine = SimpleNamespace(checkpoint_manager=manager)
    for keep, gone in ((3, []), (2, ["a"]), (2, ["a"]), (1, ["a", "b"])):
        prune(engine, keep)
        assert removed == gone and manager.previous_saved_paths == ["a", "b", "c"][len(gone) :]
