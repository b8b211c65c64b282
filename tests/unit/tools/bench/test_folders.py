"""The folder of a bench may have any characters that hydra reads as its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from seamless_verl.tools.bench.rewards.__main__ import SeedRun
from seamless_verl.tools.bench.soak.__main__ import overrides_of
from seamless_verl.tools.bench.training.arms import arms_named
from seamless_verl.tools.bench.training.settings import BenchPlan
from seamless_verl.tools.bench.training.workloads import WORKLOADS

ODD = Path("/out/a,b = {c} 'd'")


def of_soak() -> list[str]:
    return overrides_of(ODD)


def of_rewards() -> list[str]:
    return SeedRun("sync", 1, ODD, []).command(Path("/recipe"))[1:]


def of_training() -> list[str]:
    workload = WORKLOADS["w2"]
    plan = BenchPlan(workload, arms_named(workload, ["seamless-default"])[0], 3, ODD / "data", ODD, {})
    return [word for word in plan.command() if "=" in word]


@pytest.mark.parametrize("overrides", [of_soak, of_rewards, of_training])
def test_hydra_reads_the_folders_as_they_are(overrides: Callable[[], list[str]]) -> None:
    found = {one.key_or_group: one.value() for one in OverridesParser.create().parse_overrides(overrides())}
    folders = {key: value for key, value in found.items() if str(value).startswith("/out")}
    assert folders["trainer.default_local_dir"] == str(ODD / "checkpoints")
    assert folders["hydra.run.dir"] == str(ODD / "hydra")
    assert all(value.startswith(str(ODD)) for value in folders.values())
