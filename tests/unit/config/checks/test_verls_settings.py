"""What verl has and its V1 trainers, or ours, leave out: refused where a run would fail or waste, else a warning."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.config import assert_refused, compose_ours, tiny_plain, tiny_run
from support.mistakes import mistakes_of

from seamless_verl.config import preflight
from seamless_verl.config.checks import Settings, find_problems
from seamless_verl.config.checks.corrections import NOT_IN_V1
from seamless_verl.config.checks.devices import check_cpu_engines
from seamless_verl.config.checks.unused import UNREAD

ESTIMATOR, MODE = "algorithm.adv_estimator", "trainer.v1.trainer_mode"
ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
MODEL = "reward.reward_model"
SCORED = (f"{MODEL}.enable=True", f"{MODEL}.rollout.name=vllm", f"{MODEL}.model_path=/m")
CHANGED = {
    "data.truncation": "right",
    "data.sampler": "{class_path: pkg://x}",
    "trainer.balance_batch": "False",
    "trainer.esi_redundant_time": "60",
    "skip.rollout.enable": "True",
    "skip.async_rollout.enable": "True",
    f"{ROLLOUT}.router_config_path": "/router.yaml",
    "trainer.v1.sampler.max_off_policy_threshold": "2",
    "trainer.v1.sampler.max_off_policy_strategy": "wait",
}


def test_a_default_of_verl_brings_no_warning() -> None:
    config = compose_ours()
    from omegaconf import OmegaConf

    assert CHANGED.keys() == {one.key for one in UNREAD}
    for one in UNREAD:
        assert OmegaConf.select(config, one.key) in one.quiet, one.key


@pytest.mark.parametrize("one", UNREAD, ids=lambda one: one.key)
def test_a_setting_of_verl_that_nothing_reads_brings_a_warning(tmp_path: Path, one: object) -> None:
    from seamless_verl.config.checks.unused import Unread

    assert isinstance(one, Unread)
    changed = f"{one.key}={CHANGED[one.key]}"
    (warning,) = preflight(tiny_plain(tmp_path, changed), devices=1, accelerator=False)
    assert warning.startswith(f"{one.key}=") and one.reason in warning and warning.endswith(one.way_out)
    legacy = tiny_plain(tmp_path, changed, f"{MODE}=sync", "trainer.use_v1=False")
    assert preflight(legacy, devices=1, accelerator=False) == [], "verl's V0 trainer reads it"
    if one.by_ours:
        assert preflight(tiny_plain(tmp_path, changed, f"{MODE}=sync"), devices=1, accelerator=False) == []


def test_a_data_set_that_is_to_be_told_of_batches_brings_a_warning(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    for method, warned in (("on_batch_end", True), ("on_batch_ends_not", False)):
        file.write_text(f"class Mine:\n    def {method}(self, batch): ...\n")
        custom = (f"data.custom_cls.path={file}", "data.custom_cls.name=Mine")
        found = preflight(tiny_run(tmp_path, *custom), devices=1, accelerator=False)
        assert any("its on_batch_end is not called" in one for one in found) == warned


@pytest.mark.parametrize("estimator", NOT_IN_V1)
def test_an_estimator_of_verls_legacy_trainer_is_refused(tmp_path: Path, estimator: str) -> None:
    way_out = f"Set {ESTIMATOR}=grpo or rloo, or {MODE}=sync trainer.use_v1=False"
    for mode in ("seamless", "sync"):
        config = tiny_plain(tmp_path, f"{ESTIMATOR}={estimator}", f"{MODE}={mode}")
        assert_refused(config, ESTIMATOR, estimator, way_out)
    legacy = tiny_plain(tmp_path, f"{ESTIMATOR}={estimator}", f"{MODE}=sync", "trainer.use_v1=False")
    assert preflight(legacy, devices=1, accelerator=False) == []


def test_prefill_apart_is_refused(tmp_path: Path) -> None:
    key = f"{ROLLOUT}.disaggregation.enabled"
    assert_refused(tiny_run(tmp_path, f"{key}=True"), key, True, f"Set {key}=False, or use one of verl's own")


def test_batch_invariance_is_refused_on_the_cpu(tmp_path: Path) -> None:
    key = f"{ROLLOUT}.full_determinism"
    assert_refused(tiny_run(tmp_path, f"{key}=True"), key, True, f"Set {key}=False")
    assert preflight(tiny_run(tmp_path, f"{key}=True"), devices=1, accelerator=True, elsewhere=True)


def test_a_reward_model_on_the_trainers_devices_is_refused(tmp_path: Path) -> None:
    key = f"{MODEL}.enable_resource_pool"
    config = tiny_run(tmp_path, *SCORED)
    assert_refused(config, key, False, f"Set {key}=True with {MODEL}.nnodes and {MODEL}.n_gpus_per_node")
    assert preflight(tiny_run(tmp_path, f"{MODE}=sync", *SCORED), devices=1, accelerator=False) == []
    machines = "seamless.resources=[{count: 1, devices: 1, tags: [train, rollout]}]"
    by_tags = tiny_run(tmp_path, *SCORED, machines)
    assert_refused(by_tags, key, False, "Give the tag reward to machines that do not train")


def test_keys_that_moved_name_the_new_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SEAMLESS_PLATFORM", "cpu")
    for given, way_out in (
        (f"{ACTOR}.megatron.grad_offload=True", f"Leave it out: verl 0.9.1 moves gradients with {ACTOR}.megatron.p"),
        (f"+{ACTOR}.megatron.grad_offload=True", f"Leave it out: verl 0.9.1 moves gradients with {ACTOR}.megatron.p"),
        (f"+{ACTOR}.policy_loss.tau_pos=1.0", f"Set {ACTOR}.tau_pos instead"),
        (f"{ACTOR}.policy_loss.tau_neg=1.0", f"Set {ACTOR}.tau_neg instead"),
    ):
        key = given.lstrip("+").partition("=")[0]
        (found,) = [one for one in mistakes_of([given]) if one.key == key]
        assert found.way_out.startswith(way_out) and found.reason == "is not a key of verl 0.9.1"


def test_experts_that_do_not_divide_may_stay_whole(tmp_path: Path) -> None:
    megatron = f"{ACTOR}.megatron"
    sizes = (f"{megatron}.tensor_model_parallel_size=4", f"{megatron}.expert_model_parallel_size=8")
    config = tiny_run(tmp_path, *sizes, "trainer.n_gpus_per_node=8", f"{ROLLOUT}.tensor_model_parallel_size=4")
    key = f"{megatron}.expert_model_parallel_size"
    way_out = f"Set {megatron}.expert_tensor_parallel_size=1"
    assert_refused(config, key, 8, way_out, devices=8)


@pytest.mark.parametrize(("strategy", "needed"), [("fsdp", "fsdp2"), ("fsdp2", None), ("veomni", "megatron")])
def test_the_cpu_platform_trains_with_the_second_fsdp(tmp_path: Path, strategy: str, needed: str | None) -> None:
    """torch's first one synchronizes modules of an accelerator only."""
    key = "actor_rollout_ref.actor.strategy"
    settings = Settings.of(tiny_run(tmp_path, f"{key}={strategy}"), devices=1, accelerator=False)
    refusals = [] if needed is None else [(key, f"Set {key}={needed}")]
    assert [(problem.key, problem.way_out) for problem in find_problems(settings, [check_cpu_engines])] == refusals
