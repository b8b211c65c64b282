"""Every arm of a workload is a run that the checks of the configuration accept, on the same model, data and batches."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf
from support.config import compose_ours, write_model, write_rows

from seamless_verl.config import preflight
from seamless_verl.config.settings import resolved_tree
from seamless_verl.tools.compare.arms import (
    ComparedArm,
    JobFacts,
    Machines,
    arm_overrides,
    parse_arm,
)
from seamless_verl.tools.compare.budget import budget_of, check_same_budget, facts_of
from seamless_verl.tools.compare.workloads import (
    DEVICES,
    WORKLOADS,
    Workload,
    make_data,
    workload_overrides,
    write_loops,
)

W2 = WORKLOADS["w2"]
SWITCH = "separate_async:trainer.v1.separate_async.hybrid_rollout.enable_switch=true"
STREAMED = "trainer.v1.seamless.parameter_sync_step=4"
VERLS = {"sync": 2, "colocate_async": 2, "separate_async": 1, SWITCH: 1}
OURS = {
    "seamless": 2,
    "seamless:max_staleness=0:tail_batching=0.18": 2,
    f"seamless:layout=colocated:max_staleness=1:{STREAMED}": 2,
    "seamless:layout=disaggregated:max_staleness=0": 1,
    f"seamless:layout=disaggregated:max_staleness=1:{STREAMED}": 1,
    f"seamless:layout=multiplexed:max_staleness=1:{STREAMED}": 1,
}


@cache
def platform() -> DictConfig:
    return compose_ours("platform=cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_model(folder / "model")
    for name in ("train", "val"):
        write_rows(folder / f"{name}.parquet")
    return folder


def composed(workload: Workload, data: Path, *more: str) -> DictConfig:
    """As hydra would compose it: a key that is not there is refused."""
    write_loops(workload, data)
    config: DictConfig = platform().copy()
    OmegaConf.set_struct(config, True)
    for setting in (*workload_overrides(workload, data), *more):
        key, _, value = setting.partition("=")
        OmegaConf.update(config, key, yaml.safe_load(value), force_add=False)
    return config


@cache
def facts(workload: Workload, data: Path) -> JobFacts:
    return facts_of(resolved_tree(composed(workload, data)), devices=None, on_machine=2, splits=True)


def of_arm(workload: Workload, arm: ComparedArm, data: Path) -> DictConfig:
    return composed(workload, data, *arm_overrides(arm, facts(workload, data)))


@cache
def sync_budget(data: Path) -> dict[str, Any]:
    return budget_of(resolved_tree(of_arm(W2, parse_arm("sync"), data)))


@pytest.mark.parametrize(("text", "trains"), [*VERLS.items(), *OURS.items()])
def test_the_checks_accept_it_on_both_devices(text: str, trains: int, data: Path) -> None:
    config = of_arm(W2, parse_arm(text), data)
    assert preflight(config, devices=DEVICES, accelerator=False) == []
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    assert trainer.n_gpus_per_node == trains
    assert trainer.n_gpus_per_node + rollout.nnodes * rollout.n_gpus_per_node == DEVICES
    assert (config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size) == (16, 4)
    assert config.algorithm.rollout_correction.bypass_mode and not config.data.shuffle
    assert (rollout.n, rollout.max_num_seqs, rollout.dtype) == (4, 64, "float32")
    check_same_budget({"sync": sync_budget(data), text: budget_of(resolved_tree(config))})


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=list(WORKLOADS))
def test_they_accept_every_workload(workload: Workload, data: Path) -> None:
    for text in ("sync", f"seamless:layout=multiplexed:max_staleness=1:{STREAMED}"):
        config = of_arm(workload, parse_arm(text), data)
        assert preflight(config, devices=DEVICES, accelerator=False) == []
        longest = workload.prompt_tokens + workload.response_tokens
        assert longest <= config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu


def test_a_layout_with_devices_of_its_own_has_one_half_of_them() -> None:
    machine = JobFacts(Machines(1, 2), 16, 4, "gloo")
    (apart, together) = (
        arm_overrides(parse_arm(f"seamless:layout={name}"), machine) for name in ("multiplexed", "auto")
    )
    assert "trainer.n_gpus_per_node=1" in apart and "actor_rollout_ref.rollout.n_gpus_per_node=1" in apart
    assert "trainer.n_gpus_per_node=2" in together and "actor_rollout_ref.rollout.nnodes=0" in together


def test_the_data_set_does_not_begin_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asynchronous modes draw ahead, by the largest staleness at most."""
    from pyarrow import parquet

    (tmp_path / "model").mkdir()
    make_data(W2, 3, tmp_path)
    indices = [extra["index"] for extra in parquet.read_table(tmp_path / "train.parquet")["extra_info"].to_pylist()]
    assert indices == list(range(len(indices))) and len(indices) >= (3 + 8) * W2.prompts
