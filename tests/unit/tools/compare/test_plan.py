"""What a comparison will do: options that make no sense, and the order and folders of its runs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from seamless_verl.errors import ConfigError
from seamless_verl.tools.compare.arms import parse_arms
from seamless_verl.tools.compare.plan import Options, planned_runs, shared_overrides


@pytest.mark.parametrize(
    ("options", "key"),
    [
        (Options(steps=4, skip=4), "--skip"),
        (Options(rounds=0), "--rounds"),
        (Options(seeds=(1, 1)), "--seeds"),
        (Options(steps=20, validate=7), "--validate"),
        (Options(validate=-1), "--validate"),
        (Options(validate=-1), "--validate=-1: is no number of steps"),
        (Options(devices=0), "--devices"),
        (Options(timeout_s=-5.0), "--timeout=-5.0"),
        (Options(timeout_s=0.0), "--timeout"),
        (Options(timeout_s=math.nan), "--timeout=nan"),
        (Options(target_reward=math.inf), "--target-reward=inf"),
    ],
)
def test_options_that_make_no_comparison_are_refused(options: Options, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        options.check()


def test_the_default_and_validations_pass() -> None:
    Options().check()
    Options(steps=21, validate=7).check()


def test_every_arm_runs_once_for_a_seed_and_round_and_none_always_first() -> None:
    runs = list(planned_runs(parse_arms("sync,seamless"), Options(seeds=(1, 2), rounds=2), Path("/out")))
    assert [run.key for run in runs] == [
        *(("sync", 1, 1), ("seamless", 1, 1), ("seamless", 2, 1), ("sync", 2, 1)),
        *(("sync", 1, 2), ("seamless", 1, 2), ("seamless", 2, 2), ("sync", 2, 2)),
    ]
    assert len({run.folder for run in runs}) == 8 and runs[0].folder == Path("/out/sync-seed1-r1")


@pytest.mark.parametrize("folder", ["/a=b,c (d)", "/it's #1/[x]: {y}", "/back\\slash\\", "/plain"])
def test_a_runs_folder_may_have_any_name(folder: str) -> None:
    """Hydra reads brackets, commas and their like in a value that is not quoted."""
    parsed = OverridesParser.create().parse_overrides(shared_overrides(Options(), 1, Path(folder)))
    values = {one.key_or_group: one.value() for one in parsed}
    assert values["trainer.default_local_dir"] == f"{folder}/checkpoints"
    assert values["hydra.run.dir"] == f"{folder}/hydra"


def test_a_run_validates_only_if_it_was_asked_to_and_never_saves() -> None:
    found = shared_overrides(Options(steps=21, validate=7), 3, Path("/f"))
    assert {"trainer.test_freq=7", "trainer.val_before_train=True", "trainer.save_freq=-1", "data.seed=3"} <= {*found}
    assert {"trainer.test_freq=-1", "trainer.val_before_train=False"} <= {*shared_overrides(Options(), 1, Path("/f"))}
