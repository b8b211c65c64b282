"""Keys that verl does not have are refused where they are almost known ones, and sampling that no engine accepts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from support.config import assert_refused, compose_ours, compose_verl, plain, tiny_run
from support.paths import RECIPES

from seamless_verl.config import register_search_path
from seamless_verl.config.adopting import adopt_drafts
from seamless_verl.config.checks import Problem, Settings
from seamless_verl.config.checks.keys import (
    KL_ESTIMATORS,
    check_drafts,
    check_keys,
    check_kl_estimators,
    check_learning_rates,
    check_temperature,
    check_top_p,
)

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
VARIABLES = ("DATA", "RECIPE", "RUNS", "AGENT_ENV")


def problems(config: DictConfig) -> list[Problem]:
    return check_keys(Settings.of(config, devices=None, accelerator=True))


@pytest.mark.parametrize(
    ("override", "way_out"),
    [
        ("data.train_batchsize=16", "Did you mean data.train_batch_size?"),
        ("trainer.n_gpu_per_node=3", "Did you mean trainer.n_gpus_per_node?"),
        (f"{ROLLOUT}.max_num_seq=64", f"Did you mean {ROLLOUT}.max_num_seqs?"),
        ("actor_rollout_ref.model.lora.rnk=8", "Did you mean actor_rollout_ref.model.lora.rank?"),
    ],
)
def test_refused(tmp_path: Path, override: str, way_out: str) -> None:
    key, _, value = override.partition("=")
    assert_refused(tiny_run(tmp_path, override), key, int(value), way_out)


@pytest.mark.parametrize(
    "overrides",
    [
        ("data.image_keys=[a]", "data.custom_cls.path=mine.py"),
        ("critic.use_dynamic_bszz=true",),
        ("reward.reward_model.rollout.max_num_seq=3",),
        ("data.train_batchsize=16", "actor_rollout_ref.model.external_lib=mine"),
    ],
)
def test_what_verl_does_not_make_or_code_of_the_users_gets_is_a_warning(
    tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    (found,) = problems(tiny_run(tmp_path, *overrides))
    assert found.warning and found.key == overrides[0].partition("=")[0]


def test_keys_that_are_no_texts_are_the_users_own(tmp_path: Path) -> None:
    assert problems(tiny_run(tmp_path, "mine.weights={0:1,1:0.5}", "data.curriculum={0:100,true:3}")) == []


@pytest.mark.parametrize(
    "override",
    [
        "data.image_key=images",  # verl's yaml lacks these three, and verl reads them
        "data.gen_batch_size=8",
        f"{ACTOR}.checkpoint.save_lora_only=True",
        f"{ROLLOUT}.engine_kwargs.vllm.max_num_seq=1",
        "actor_rollout_ref.model.override_config.train_batchsize=1",
        f"{ACTOR}.megatron.override_transformer_config.n_layer=1",
        "reward.reward_kwargs.max_resp_len=3",
        "ray_kwargs.ray_init.num_cpu=3",
        "trainer.v1.mine.parameter_sync_step=1",  # a trainer of the user's
        "mine.train_batchsize=1",
    ],
)
def test_nothing_to_say(tmp_path: Path, override: str) -> None:
    assert problems(tiny_run(tmp_path, override)) == []


@pytest.mark.parametrize("engine", ["dp", "megatron", "veomni", "torchtitan"])
def test_every_engine_has_its_own_keys(engine: str) -> None:
    assert problems(compose_ours("platform=cpu", f"model_engine={engine}")) == []
    assert problems(compose_verl(f"model_engine={engine}")) == []


@pytest.mark.parametrize("recipe", sorted(file.parent.name for file in RECIPES.glob("*/config.yaml")))
def test_recipes_have_no_other_keys(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "/none")
    register_search_path()
    with initialize_config_dir(str(RECIPES / recipe), version_base=None):
        assert problems(compose("config")) == []


def temperatures(folder: Path, values: dict[str, Any]) -> list[str]:
    tree = plain(tiny_run(folder))
    tree["actor_rollout_ref"]["rollout"] |= values
    return [one.key for one in check_temperature(Settings.of(tree, devices=None, accelerator=False))]


@pytest.mark.parametrize(("value", "wrong"), [(-1, True), (0, True), (0.7, False), (1, False)])
def test_the_temperature_is_above_0(tmp_path: Path, value: float, wrong: bool) -> None:
    assert temperatures(tmp_path, {"temperature": value}) == [f"{ROLLOUT}.temperature"] * wrong


@pytest.mark.parametrize(("samples", "found"), [(True, [f"{ROLLOUT}.val_kwargs.temperature"]), (False, [])])
def test_a_validation_without_sampling_has_no_temperature(tmp_path: Path, samples: bool, found: list[str]) -> None:
    assert temperatures(tmp_path, {"val_kwargs": {"temperature": 0, "do_sample": samples}}) == found


@pytest.mark.parametrize(("value", "wrong"), [(0.9, False), (1, False), (0, True), (2, True), (-0.5, True)])
@pytest.mark.parametrize("node", ["", "val_kwargs."])
def test_the_share_of_top_p_is_above_0_and_at_most_1(tmp_path: Path, node: str, value: float, wrong: bool) -> None:
    key = f"{ROLLOUT}.{node}top_p"
    tree = tiny_run(tmp_path, f"{key}={value}")
    problems = check_top_p(Settings.of(tree, devices=None, accelerator=False))
    assert [str(problem) for problem in problems] == [
        f"{key}={value}: must be above 0 and at most 1. Set {key}=1.0"
    ] * wrong


@pytest.mark.parametrize(("value", "refused"), [("1e-6", ""), ("0", ""), ("abc", "'abc'"), ("-1", "-1")])
def test_a_learning_rate_is_a_number(tmp_path: Path, value: str, refused: str) -> None:
    tree = tiny_run(tmp_path, f"{ACTOR}.optim.lr={value}")
    problems = check_learning_rates(Settings.of(tree, devices=None, accelerator=False))
    assert [str(one) for one in problems] == [
        f"{ACTOR}.optim.lr={refused}: is no rate. Set {ACTOR}.optim.lr=1e-6"
    ] * bool(refused)


@pytest.mark.parametrize("name", [*KL_ESTIMATORS, "k3+", "nosuch"])
@pytest.mark.parametrize(
    ("key", "flag"),
    [(f"{ACTOR}.kl_loss_type", f"{ACTOR}.use_kl_loss"), ("algorithm.kl_penalty", "algorithm.use_kl_in_reward")],
)
@pytest.mark.parametrize("used", [True, False])
def test_a_kl_estimator_is_one_of_verls_where_it_is_used(
    tmp_path: Path, key: str, flag: str, name: str, used: bool
) -> None:
    tree = tiny_run(tmp_path, f"{key}={name}", f"{flag}={used}")
    problems = check_kl_estimators(Settings.of(tree, devices=None, accelerator=False))
    assert [str(one) for one in problems] == [
        f"{key}='nosuch': is none of {', '.join(KL_ESTIMATORS)}. Set {key}=low_var_kl"
    ] * (used and name == "nosuch")


DRAFTS = "seamless.drafts=suffix"
NGRAM = f"+{ROLLOUT}.engine_kwargs.vllm.speculative_config={{method: ngram, num_speculative_tokens: 3}}"


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ((DRAFTS, NGRAM), "contradicts actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config, which drafts"),
        ((DRAFTS, "actor_rollout_ref.model.mtp.enable=true", "actor_rollout_ref.model.mtp.enable_rollout=true"), "mtp"),
        ((DRAFTS, f"{ROLLOUT}.enable_rollout_routing_replay=true"), "is not proved with"),
        ((DRAFTS, "trainer.v1.trainer_mode=sync"), "is for the replicas of seamless"),
        ((DRAFTS,), None),
        ((NGRAM,), None),
    ],
)
def test_one_setting_asks_for_drafts(tmp_path: Path, overrides: tuple[str, ...], reason: str | None) -> None:
    config = tiny_run(tmp_path, "trainer.v1.trainer_mode=seamless", *overrides)
    for _ in range(2):  # again with what follows from the setting
        found = check_drafts(Settings.of(config, devices=None, accelerator=True))
        assert [reason in problem.reason for problem in found] == ([True] if reason else [])
        adopt_drafts(config)
