"""Temperatures with which a run would train or validate something else than was meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.config import plain, tiny_run

from seamless_verl.config.checks.values import check_temperature
from seamless_verl.config.settings import Settings

ROLLOUT = "actor_rollout_ref.rollout"


def problems(folder: Path, values: dict[str, Any]) -> list[str]:
    tree = plain(tiny_run(folder))
    tree["actor_rollout_ref"]["rollout"] |= values
    return [one.key for one in check_temperature(Settings.of(tree, devices=None, accelerator=False))]


@pytest.mark.parametrize(("value", "wrong"), [(-1, True), (0, True), (0.7, False), (1, False)])
def test_the_temperature_is_above_0(tmp_path: Path, value: float, wrong: bool) -> None:
    assert problems(tmp_path, {"temperature": value}) == [f"{ROLLOUT}.temperature"] * wrong


@pytest.mark.parametrize(("samples", "found"), [(True, [f"{ROLLOUT}.val_kwargs.temperature"]), (False, [])])
def test_a_validation_without_sampling_has_no_temperature(tmp_path: Path, samples: bool, found: list[str]) -> None:
    assert problems(tmp_path, {"val_kwargs": {"temperature": 0, "do_sample": samples}}) == found
