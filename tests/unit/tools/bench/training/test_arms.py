"""Every arm is a run that the checks of the configuration accept, on the same model, data and batches."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf
from support.config import UNREAD, compose_ours, write_model, write_rows

from seamless_verl.config import preflight
from seamless_verl.errors import ConfigError
from seamless_verl.tools.bench.training.arms import (
    MODE,
    SEAMLESS,
    VERL,
    Arm,
    arms_named,
    begins_prompts_again,
    default_arms,
    verl_arms,
)
from seamless_verl.tools.bench.training.settings import DEVICES, BenchPlan, make_prompts, shared
from seamless_verl.tools.bench.training.workloads import PROMPT_TOKENS, WORKLOADS, Workload

W2 = WORKLOADS["w2"]
ARMS = default_arms(W2)


UNREAD_HERE = set(UNREAD) - {"agent", "engine_kwargs"}


@cache
def platform() -> DictConfig:
    return compose_ours("platform=cpu")


@cache
def of_all_arms(workload: Workload, data: Path) -> bytes:
    """What all arms share, without what neither they nor the checks read, pickled: so copies take the least time."""
    config = copy.deepcopy(platform())
    update(config, shared(workload, data))
    return pickle.dumps(OmegaConf.create(without(OmegaConf.to_container(config), UNREAD_HERE)))


def without(node: Any, names: set[str]) -> Any:
    if not isinstance(node, dict):
        return node
    return {key: without(value, names) for key, value in node.items() if key not in names}


def update(config: DictConfig, overrides: Mapping[str, object]) -> None:
    """As hydra would: a key that is not there is refused."""
    OmegaConf.set_struct(config, True)
    for key, value in overrides.items():
        if not key.startswith("hydra."):
            given = yaml.safe_load(str(value)) if isinstance(value, (str, Path)) else value
            OmegaConf.update(config, key, given, force_add=False)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_model(folder / "model")
    for name in ("train", "val"):
        write_rows(folder / f"{name}.parquet")
    return folder


def plan_for(arm: Arm, data: Path, folder: Path, workload: Workload = W2, **extra: str) -> BenchPlan:
    plan = BenchPlan(workload, arm, 12, data, folder, extra)
    plan.write_loops()
    return plan


def composed(plan: BenchPlan) -> DictConfig:
    config: DictConfig = pickle.loads(of_all_arms(plan.workload, plan.data))
    everything = shared(plan.workload, plan.data)
    update(config, {key: value for key, value in plan.overrides.items() if everything.get(key) != value})
    return config


@pytest.mark.parametrize("arm", ARMS, ids=[arm.name for arm in ARMS])
def test_the_checks_accept_it_on_both_devices(arm: Arm, data: Path, tmp_path: Path) -> None:
    config = composed(plan_for(arm, data, tmp_path))
    warnings = preflight(config, devices=DEVICES, accelerator=False)
    assert len(warnings) == ("-s4" in arm.name) and all("does not correct for that" in warning for warning in warnings)
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    assert trainer.n_gpus_per_node == arm.trains
    assert trainer.n_gpus_per_node + rollout.nnodes * rollout.n_gpus_per_node == DEVICES
    assert (config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size) == (16, 4)
    assert config.algorithm.rollout_correction.bypass_mode and not config.data.shuffle
    assert (rollout.n, rollout.max_num_seqs, rollout.dtype) == (4, 64, "float32")


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=list(WORKLOADS))
def test_they_accept_every_workload(workload: Workload, data: Path, tmp_path: Path) -> None:
    for arm in (verl_arms(workload)[0], *arms_named(workload, ["seamless-multiplexed-s1-streamed"])):
        config = composed(plan_for(arm, data, tmp_path, workload))
        assert preflight(config, devices=DEVICES, accelerator=False) == []
        longest = PROMPT_TOKENS + workload.response_tokens
        assert longest <= config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu


def test_only_the_poll_differs_between_a_mode_and_itself_with_a_lower_one() -> None:
    arms = {arm.name: arm for arm in verl_arms(W2)}
    for name in ("sync", "colocate_async", "separate_async", "separate_async-switch"):
        more = dict(arms[f"{name}-poll"].overrides.items() - arms[name].overrides.items())
        assert more == {
            "trainer.v1.sampler.custom_sampler.path": "pkg://seamless_verl.tools.bench.training.polling",
            "trainer.v1.sampler.custom_sampler.name": "PollingReplayBuffer" + ("" if name == "sync" else "Async"),
        }
        assert "trainer.v1.sampler.custom_sampler.path" not in arms[name].overrides


def test_verls_modes_run_verls_main_job(data: Path, tmp_path: Path) -> None:
    for arm in ARMS:
        command = plan_for(arm, data, tmp_path, **{"trainer.project_name": "mine"}).command()
        assert (VERL in command) == (arm.overrides[MODE] != "seamless") == (SEAMLESS not in command)
        assert ("+platform=cpu" in command) == (VERL in command)
        assert command[-1] == "trainer.project_name=mine"  # after ours, so that hydra takes it


def test_the_environment_is_the_same_for_all(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    environments = [plan_for(arm, data, tmp_path).environment() for arm in ARMS]
    assert all(environment == environments[0] for environment in environments)
    assert environments[0]["SEAMLESS_CPU_DEVICES"] == "2" and environments[0]["SEAMLESS_CPU_PIN"] == "1"


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (["sync", "sync"], ["sync"]),
        (["seamless-multiplexed-s4", "sync-poll"], ["seamless-multiplexed-s4", "sync-poll"]),
        (["separate*-poll"], ["separate_async-poll", "separate_async-switch-poll"]),
        (["seamless-colocated-s7-streamed"], ["seamless-colocated-s7-streamed"]),
        (["all"], [arm.name for arm in ARMS]),
    ],
)
def test_arms_by_name(patterns: list[str], names: list[str]) -> None:
    assert [arm.name for arm in arms_named(W2, patterns)] == names


@pytest.mark.parametrize("name", ["asynchronous", "seamless-colocated", "seamless-everywhere-s1", ""])
def test_an_unknown_arm_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="no arm has that name") as caught:
        arms_named(W2, [name])
    assert "sync-poll" in str(caught.value)


def test_the_settings_of_our_arms() -> None:
    (arm,) = arms_named(W2, ["seamless-disaggregated-s4-streamed"])
    wanted: dict[str, Any] = {
        "seamless.layout": "disaggregated",
        "seamless.max_staleness": 4,
        "trainer.v1.seamless.parameter_sync_step": 4,
    }
    assert wanted.items() <= arm.overrides.items() and arm.main == SEAMLESS
    (plain,) = arms_named(W2, ["seamless-disaggregated-s4"])
    assert arm.overrides.keys() - plain.overrides.keys() == {"trainer.v1.seamless.parameter_sync_step"}


def test_an_arm_may_run_ahead_and_keep_its_cache() -> None:
    (arm,) = arms_named(W2, ["seamless-colocated-s8-ahead2-keep-streamed"])
    (plain,) = arms_named(W2, ["seamless-colocated-s8-streamed"])
    assert arm.overrides == {**plain.overrides, "seamless.ahead": 2, "seamless.weights.kv": "keep"}
    with pytest.raises(ConfigError, match="-keep and -streamed in this order"):
        arms_named(W2, ["seamless-colocated-s8-streamed-keep"])


def test_an_arm_may_batch_its_tails() -> None:
    (arm,) = arms_named(W2, ["seamless-colocated-s0-tail20"])
    (plain,) = arms_named(W2, ["seamless-colocated-s0"])
    assert arm.overrides == {**plain.overrides, "seamless.tail_batching": 0.2}
    names = ["seamless-colocated-s0-streamed-tail5", "seamless-colocated-s0-streamed", "sync"]
    assert [begins_prompts_again(name) for name in names] == [True, False, False]


def test_the_data_set_does_not_begin_anew(tmp_path: Path) -> None:
    """Asynchronous modes draw ahead, by the largest staleness at most."""
    from pyarrow import parquet

    make_prompts(W2, 3, tmp_path)
    indices = [extra["index"] for extra in parquet.read_table(tmp_path / "train.parquet")["extra_info"].to_pylist()]
    assert indices == list(range(len(indices))) and len(indices) >= (3 + 8) * W2.prompts
