"""Trainer and engines are compared in each step, also at the defaults; what makes them differ is named when it does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.data.mismatched import RENDERED, SHIFTED, TEMPERATURE
from support.job import POOL, run
from support.paths import DATA

pytestmark = [pytest.mark.integration]
ENGINE, RECORD = "seamless/agreement/engine/", "seamless/agreement/record/mean"
DEFAULTS: dict[str, Any] = {
    "algorithm__rollout_correction__bypass_mode": True,
    "actor_rollout_ref__actor__optim__lr": 1e-4,
    "trainer__total_training_steps": 6,
    "data__max_response_length": 32,
    "actor_rollout_ref__rollout__max_num_seqs": 8,  # groups end one after another: an engine reads of the first of them
}


def test_in_a_run_with_old_tokens_engine_and_trainer_agree_by_the_same_weights(nano: Path, tmp_path: Path) -> None:
    """Samples are up to two versions old, and what is compared is not."""
    job = run(tmp_path, nano, **DEFAULTS, **POOL, seamless__max_staleness=2, seamless__ahead=2)
    compared = {step: metrics for step, metrics in job.metrics().items() if f"{ENGINE}mean" in metrics}
    print({step: {n: v for n, v in m.items() if "agreement" in n} for step, m in compared.items()})  # noqa: T201
    assert compared.keys() == job.metrics().keys(), "an engine reads while training computes"
    assert max(m["training/off_policy/trajectory_staleness_worst/max"] for m in compared.values()) > 0
    for metrics in compared.values():
        assert metrics[f"{ENGINE}tokens"] > 0 and metrics[f"{ENGINE}mean"] < 0.01
        assert metrics["seamless/agreement/usual"] == 1
    assert "other logprobs than" not in job.log()


def test_an_engine_that_reads_the_model_otherwise_is_noticed_in_the_first_steps(nano: Path, tmp_path: Path) -> None:
    """As when a setting of the model reaches one side alone; its own record agrees with what it reads."""
    override = {"+actor_rollout_ref__rollout__engine_kwargs__vllm__hf_overrides": "{rms_norm_eps: 100.0}"}
    job = run(tmp_path, nano, **DEFAULTS, **POOL, **override, seamless__max_staleness=1)
    compared = {step: metrics for step, metrics in job.metrics().items() if f"{ENGINE}mean" in metrics}
    print({step: {n: v for n, v in m.items() if "agreement" in n} for step, m in compared.items()})  # noqa: T201
    first = compared[min(compared)]
    assert min(compared) <= 2 and first["seamless/agreement/usual"] == 0
    assert all(m["seamless/agreement/record/mean"] < 0.01 for m in compared.values() if RECORD in m)
    assert "Likely no replica agreed yet: compare both models' settings" in job.log()
    assert "its weights are those that were sent, to the bit" in job.log()


def test_faults_are_named_in_the_step_in_which_they_appear(nano: Path, tmp_path: Path) -> None:
    """Of one run whose rows are right in every other step; without staleness a row's tokens are of one version."""
    faults = {
        TEMPERATURE: "temperature: its record is that of about ",
        SHIFTED: "its record is that of tokens -1 places on",
        RENDERED: "tokens: its record ",
    }
    loops = {
        "actor_rollout_ref__rollout__agent__agent_loop_config_path": DATA / "mismatch_loops.yaml",
        "actor_rollout_ref__rollout__agent__default_agent_loop": "mismatched",
        "actor_rollout_ref__actor__optim__lr": 1e-2,  # so that ids differ in how likely they are
        "trainer__total_training_steps": 8,
    }
    job = run(tmp_path, nano, **DEFAULTS | loops, **POOL, seamless__max_staleness=0)
    compared = job.metrics()
    print({step: {n: v for n, v in m.items() if "agreement" in n} for step, m in compared.items()})  # noqa: T201
    print([line for line in job.log().splitlines() if "other logprobs than" in line])  # noqa: T201
    lines = re.findall(r"other logprobs than .* version (\d+): .* Likely (.*)", job.log())
    assert {step - 1: m["seamless/agreement/usual"] for step, m in compared.items()} == {
        version: float(version not in faults) for version in range(8)
    }
    assert [int(version) for version, _ in lines] == list(faults)
    assert all(likely.startswith(faults[int(version)]) for version, likely in lines)
    (times,) = re.findall(r"about ([\d.]+) times", lines[0][1])
    assert float(times) == pytest.approx(2, rel=0.01)


def test_kv_that_was_kept_is_named_where_a_sample_has_older_tokens(nano: Path, tmp_path: Path) -> None:
    """Calls that run across a commit keep theirs, as if it had not been dropped."""
    kept = {
        "seamless__weights__kv": "keep",
        "actor_rollout_ref__actor__optim__lr": 1e-2,
        "data__max_response_length": 48,
        "trainer__total_training_steps": 14,
    }
    job = run(tmp_path, nano, **DEFAULTS | kept, **POOL, seamless__max_staleness=2, seamless__ahead=2)
    lines = re.findall(r"other logprobs than (.*), by .* Likely (.*)", job.log())
    assert lines and all(likely.startswith("KV kept from older weights") for _, likely in lines)


def test_at_another_temperature_and_on_the_trainers_own_devices_they_agree(nano: Path, tmp_path: Path) -> None:
    """Training takes each engine's device: a sample is read while training waits for groups, if one ends before."""
    job = run(tmp_path, nano, **DEFAULTS, actor_rollout_ref__rollout__temperature=0.7, seamless__max_staleness=1)
    compared = {step: metrics for step, metrics in job.metrics().items() if f"{ENGINE}mean" in metrics}
    print(compared.keys(), {step: {n: v for n, v in m.items() if "agreement" in n} for step, m in compared.items()})  # noqa: T201
    assert len(compared) >= 3
    for metrics in compared.values():
        assert metrics[f"{ENGINE}mean"] < 0.01 and metrics["seamless/agreement/usual"] == 1
    assert "other logprobs than" not in job.log()
