"""Single values that verl or vLLM would refuse only when the run has started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.config import plain, tiny_run

from seamless_verl.config.checks.values import check_choices, check_flags, check_numbers, check_temperature
from seamless_verl.config.settings import Settings

CHECKS = (check_numbers, check_temperature, check_flags, check_choices)


def problems(folder: Path, key: str, value: Any) -> list[str]:
    tree = plain(tiny_run(folder))
    *path, last = key.split(".")
    node = tree
    for name in path:
        node = node.setdefault(name, {})
    node[last] = value
    settings = Settings.of(tree, devices=None, accelerator=False)
    return [problem.key for check in CHECKS for problem in check(settings)]


ROLLOUT = "actor_rollout_ref.rollout"


@pytest.mark.parametrize(
    ("key", "wrong", "right"),
    [
        ("data.seed", "abc", 7),
        ("data.shuffle", 7, False),
        ("trainer.val_before_train", "maybe", True),
        (f"{ROLLOUT}.temperature", -1, 0.7),
        (f"{ROLLOUT}.temperature", 0, 1),
        (f"{ROLLOUT}.top_p", 7, 0.9),
        (f"{ROLLOUT}.val_kwargs.top_p", 0, 1.0),
        (f"{ROLLOUT}.dtype", "float9", "bfloat16"),
        ("actor_rollout_ref.actor.loss_agg_mode", "token", "seq-mean-token-sum"),
    ],
)
def test_a_wrong_value_is_named_and_a_right_one_is_not(tmp_path: Path, key: str, wrong: Any, right: Any) -> None:
    assert problems(tmp_path, key, wrong) == [key]
    assert problems(tmp_path, key, right) == []


@pytest.mark.parametrize(("samples", "found"), [(True, [f"{ROLLOUT}.val_kwargs.temperature"]), (False, [])])
def test_a_validation_without_sampling_has_no_temperature(tmp_path: Path, samples: bool, found: list[str]) -> None:
    given = {"temperature": 0, "do_sample": samples, "n": 1, "top_p": 1.0}
    assert problems(tmp_path, f"{ROLLOUT}.val_kwargs", given) == found
