"""The loss that corrects for old tokens, and how old they may be: set in verl's fields, unless the user set these."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf
from support.config import TINY, compose_ours, refused, tiny_run

from seamless_verl.config.checks import preflight
from seamless_verl.config.correcting import DPPO, LOSS_MODE, adopt_correction

OURS = "trainer.v1.trainer_mode=seamless"
LOSS = (OURS, "seamless.correction.loss=dppo")
CLIP = "actor_rollout_ref.actor.clip_ratio_high"


def test_a_loss_is_set_where_verl_has_its_defaults(tmp_path: Path) -> None:
    config = compose_ours(*TINY, *LOSS)
    assert {key: OmegaConf.select(config, key) for key in DPPO} == {key: verls for key, (verls, _) in DPPO.items()}
    adopt_correction(config)
    assert {key: OmegaConf.select(config, key) for key in DPPO} == {key: value for key, (_, value) in DPPO.items()}
    tiny = tiny_run(tmp_path, *LOSS, "seamless.max_staleness=4")
    adopt_correction(tiny)
    assert preflight(tiny, devices=1, accelerator=False) == []


def test_what_the_user_set_of_a_loss_stays(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, *LOSS, f"{CLIP}=0.3", "actor_rollout_ref.actor.clip_ratio=0.2")
    adopt_correction(config, ["actor_rollout_ref.actor.clip_ratio=0.2"])
    actor = config.actor_rollout_ref.actor
    assert (actor.clip_ratio, actor.clip_ratio_low, actor.clip_ratio_high) == (0.2, 0.15, 0.3)


def test_another_loss_beside_it_is_refused(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, *LOSS, "actor_rollout_ref.actor.policy_loss.loss_mode=m2po")
    adopt_correction(config)
    (problem,) = refused(config)
    assert problem.key == "seamless.correction.loss" and "loss_mode=m2po" in problem.reason


def test_verls_trainers_keep_their_loss(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, "trainer.v1.trainer_mode=sync", "seamless.correction.loss=dppo")
    before = OmegaConf.to_container(config)
    adopt_correction(config)
    assert OmegaConf.to_container(config) == before
    preflight(config, devices=1, accelerator=False)


def chosen(config: DictConfig) -> tuple[str | None, int, str]:
    """The correction, the bound, and verl's loss."""
    loss = OmegaConf.select(config, LOSS_MODE) or "vanilla"
    return config.seamless.correction.loss, config.seamless.max_staleness, loss


def test_by_default_old_tokens_are_trained_by_a_loss_that_corrects(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, OURS)
    words = adopt_correction(config)
    assert words is not None and "loss=dppo" in words and "max_staleness=4" in words
    assert chosen(config) == ("dppo", 4, "dppo_tv")
    assert adopt_correction(config) is None, "what is chosen stays"
    assert preflight(config, devices=1, accelerator=False) == []


CORRECTION = "algorithm.rollout_correction"


ALL_THE_SAME = f"{CLIP}=0.28 is set (seamless.correction.loss=dppo asks for DPPO's all the same)"


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ((f"{CLIP}=0.28",), ALL_THE_SAME),
        ((f"{LOSS_MODE}=gspo",), f"{LOSS_MODE}=gspo is set;"),
        ((f"{CORRECTION}.bypass_mode=False",), f"{CORRECTION}.bypass_mode=False is set;"),
        (
            (f"{CLIP}=0.28", f"{LOSS_MODE}=gspo", f"{CORRECTION}.rollout_is=token"),
            f"{LOSS_MODE}=gspo, {CLIP}=0.28 and 1 more are set;",
        ),
        (("seamless.tokens.policy=mask_older_than",), "seamless.tokens.policy=mask_older_than is set (seamless."),
        (("distillation.enabled=True",), "distillation.enabled=True is set;"),
        (("seamless.max_staleness=0", f"{CLIP}=0.28"), "seamless.max_staleness=0 trains nothing old ("),
    ],
)
def test_what_decided_for_the_runs_own_loss_is_named(tmp_path: Path, overrides: tuple[str, ...], why: str) -> None:
    words = adopt_correction(tiny_run(tmp_path, OURS, *overrides), overrides)
    assert words is not None and f"chosen: seamless.correction.loss=null, since {why}" in words


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((f"{LOSS_MODE}=gspo",), (None, 1, "gspo")),
        ((f"{LOSS_MODE}=vanilla",), (None, 1, "vanilla")),
        ((f"{LOSS_MODE}=m2po",), (None, 4, "m2po")),
        ((f"{CORRECTION}.rollout_is=token",), (None, 4, "vanilla")),
        ((f"{CLIP}=0.28",), (None, 1, "vanilla")),
        (("actor_rollout_ref.actor.clip_ratio=0.2",), (None, 1, "vanilla")),
        (("actor_rollout_ref.actor.clip_ratio_c=10",), (None, 1, "vanilla")),
        ((f"{CORRECTION}.bypass_mode=False",), (None, 1, "vanilla")),
        ((f"{CORRECTION}.bypass_mode=True",), ("dppo", 4, "dppo_tv")),
        (("seamless.max_staleness=0",), (None, 0, "vanilla")),
        (("seamless.max_staleness=2",), ("dppo", 2, "dppo_tv")),
        (("seamless.correction.loss=null",), (None, 1, "vanilla")),
        (("seamless.tokens.policy=mask_older_than",), (None, 1, "vanilla")),
    ],
)
def test_a_run_that_says_how_it_trains_keeps_that(
    tmp_path: Path, overrides: tuple[str, ...], expected: tuple[str | None, int, str]
) -> None:
    config = tiny_run(tmp_path, OURS, *overrides)
    adopt_correction(config, overrides)
    assert chosen(config) == expected
    assert preflight(config, devices=1, accelerator=False) == [], "what was chosen needs no warning"
