"""Layouts of clusters of up to 64 accelerators pass on a machine without any: the plan, verl's validation, memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.layouts import LAYOUTS, Case, composed, settings_of

from seamless_verl.cli.main import main
from seamless_verl.config.adopting import adopt_handover
from seamless_verl.config.checks import find_problems
from seamless_verl.config.planning import choose_handover, plan_of
from seamless_verl.resources.memory_fit import both_sides

OF_THIS_MACHINE = ("platform", "vllm")  # what it has not installed
PARAMETERS = {"qwen3_8b": 8_190_735_360, "qwen3_32b": 32_762_123_264, "qwen3_30b_a3b": 30_532_122_624}  # as published


def case(name: str) -> Case:
    return next(case for case in LAYOUTS if case.name == name)


@pytest.mark.parametrize("case", LAYOUTS, ids=lambda case: case.name)
def test_a_layout_passes(case: Case, tmp_path: Path) -> None:
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    config = composed(case, tmp_path)
    settings = settings_of(config)
    plan = plan_of(settings)
    assert (plan.layout.value, len(plan.devices)) == (case.layout, case.devices)
    assert plan.parameters == PARAMETERS[case.model]
    assert [str(p) for p in find_problems(settings) if p.key not in OF_THIS_MACHINE] == []
    assert len(plan.hosts) == max(1, case.devices // 8)
    staging = [host for host in plan.hosts if dict(host.parts).get("staged weights") == 2 * plan.parameters]
    training_only = [host for host in plan.hosts if host not in staging]
    assert all(plan.layout.value == "disaggregated" and host.node > 0 for host in training_only)
    assert adopt_handover(config) is not None and config.seamless.handover == case.handover
    validate_config(config, need_reference_policy(config), need_critic(config))


def test_the_reason_of_a_handover_has_the_sizes(tmp_path: Path) -> None:
    for name, words in (
        ("8B on 8, small cache", "resident: both fit, trainer and engine together need up to 58.8 GB of 80.0 GB"),
        ("8B on 8", "released: trainer and engine together need up to 78.8 GB of 80.0 GB, of which 90% may be planned"),
        ("8B on 32, apart", "resident: no device both trains and generates"),
    ):
        assert f"seamless.handover={words}" in str(choose_handover(settings_of(composed(case(name), tmp_path))))


def test_resident_is_refused_where_both_sides_do_not_fit(tmp_path: Path) -> None:
    settings = settings_of(composed(case("8B on 1"), tmp_path, "seamless.handover=resident"))
    (problem,) = (p for p in find_problems(settings) if p.key not in OF_THIS_MACHINE)
    assert "a device of group group0 would need" in problem.reason and "in phase train" in problem.reason
    assert problem.reason.endswith("and has 80.0 GB") and "KV cache" in problem.reason
    assert "set seamless.handover=released with actor_rollout_ref.rollout.free_cache_engine=True" in problem.way_out
    fullest = both_sides(plan_of(settings))
    assert fullest is not None and fullest.peak.certain > 80 * 10**9


def test_a_model_too_big_for_its_devices_is_refused_with_sizes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [text for text in case("32B on 8").overrides if "optimizer_cpu_offload" not in text]
    assert main(["plan", *overrides]) == 2
    refusal = capsys.readouterr().err
    assert "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=8" in refusal
    assert "would need 124.9 GB in phase switch (optimizer 49.2 GB" in refusal and "and has 80.0 GB" in refusal
    assert "optimizer_cpu_offload=True" in refusal and "param_offload=True" in refusal


def test_hosts_too_small_for_staged_and_offloaded_state_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *case("32B on 8").overrides, "seamless.host_memory_gb=400"]) == 2
    refusal = capsys.readouterr().err
    assert "override_optimizer_config.optimizer_cpu_offload=True: a machine of group group0 would need" in refusal
    assert "475.9 GB of host memory (optimizer on the host 393.2 GB, staged weights 65.5 GB" in refusal
    assert "and has 400.0 GB" in refusal


def test_the_plan_prints_the_handover_and_the_hosts_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *case("8B on 64").overrides]) == 0
    printed = capsys.readouterr().out
    assert "multiplexed: 8 machines, 64 devices" in printed
    assert "host memory: up to 33.6 GB of 1000.0 GB a machine (processes 17.2 GB, staged weights 16.4 GB)" in printed
    assert "\nseamless.handover=released: trainer and engine together need up to" in printed
    waits = "while they are staged, the trainer waits for it (tensor_model_parallel_size=2)"
    assert f"\nweights: exported by Megatron-Bridge; {waits}\n" in printed
    assert main(["plan", "--json", *case("8B on 64").overrides]) == 0
    assert len(json.loads(capsys.readouterr().out)["plan"]["hosts"]) == 8
