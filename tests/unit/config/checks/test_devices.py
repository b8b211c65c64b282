"""`seamless.resources` in a whole config: verl's fields follow, contradictions name both keys, preflight refuses."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf
from support.config import TINY_CLI, assert_refused, compose_verl, refused, tiny_files, tiny_run, write_model
from support.resources import QWEN3_8B

from seamless_verl.cli.main import main
from seamless_verl.config import SeamlessConfig, preflight
from seamless_verl.config.adopting import VERL_DEFAULTS, adopt_resources
from seamless_verl.config.checks import Settings, hosts
from seamless_verl.config.planning import plan_of
from seamless_verl.resources.plan import Plan
from seamless_verl.resources.tags import KEY, Layout

ROLLOUT = "actor_rollout_ref.rollout"
GLOO = f"{ROLLOUT}.checkpoint_engine.backend=gloo"
ONE = "{count: 1, devices: 1, tags: [train, rollout]}"
TWO = f"{KEY}=[{ONE}, {{name: more, count: 1, devices: 1, tags: [rollout]}}]"
COLOCATED = f"{KEY}=[{{count: 1, devices: 2, tags: [train, rollout]}}]"
APART = f"{KEY}=[{{count: 1, devices: 1, tags: [train]}}, {{count: 1, devices: 1, tags: [rollout]}}]"


def adopted(folder: Path, *overrides: str) -> DictConfig:
    config = tiny_run(folder, "trainer.device=cpu", *overrides)
    adopt_resources(config)
    return config


def sizes(config: DictConfig) -> list[int]:
    rollout = config.actor_rollout_ref.rollout
    return [config.trainer.nnodes, config.trainer.n_gpus_per_node, rollout.nnodes, rollout.n_gpus_per_node]


def test_the_defaults_are_verls() -> None:
    config = compose_verl()
    for key, value in VERL_DEFAULTS.items():
        assert OmegaConf.select(config, key) == value, key
    assert OmegaConf.is_interpolation(config.actor_rollout_ref.rollout, "n_gpus_per_node")


@pytest.mark.parametrize(
    ("overrides", "layout", "expected"),
    [
        ((COLOCATED,), Layout.COLOCATED, [1, 2, 0, 2]),
        ((APART, GLOO), Layout.DISAGGREGATED, [1, 1, 1, 1]),
        ((TWO, GLOO), Layout.MULTIPLEXED, [1, 1, 1, 1]),
    ],
)
def test_verls_fields_follow(tmp_path: Path, overrides: tuple[str, ...], layout: Layout, expected: list[int]) -> None:
    config = adopted(tmp_path, *overrides)
    assert sizes(config) == expected
    assert SeamlessConfig.parse(config.seamless).layout_for(0, 0) is layout
    assert preflight(config, devices=2, accelerator=False) == []


def test_without_tags_nothing_is_touched(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, "trainer.n_gpus_per_node=3")
    before = OmegaConf.to_container(config)
    adopt_resources(config)
    assert OmegaConf.to_container(config) == before
    plan = plan_of(Settings.of(config, devices=None, accelerator=False))
    assert plan.layout is Layout.COLOCATED and len(plan.trainer.devices) == 3


@pytest.mark.parametrize("given", [("trainer.nnodes=2",), ("trainer.n_gpus_per_node=4",), (f"{ROLLOUT}.nnodes=3",)])
def test_what_is_said_twice_and_differs_names_both_keys(tmp_path: Path, given: tuple[str, ...]) -> None:
    key, _, value = given[0].partition("=")
    config = adopted(tmp_path, TWO, GLOO, *given)
    assert_refused(config, key, int(value), f"Remove {key}, or {KEY}", devices=2)
    assert f"contradicts {KEY}, from which 1 follows" in str(refused(config, devices=2)[0])


def test_a_default_on_the_command_line_was_said(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, "trainer.device=cpu", COLOCATED)
    adopt_resources(config, ["+trainer.n_gpus_per_node=1"])
    assert [problem.key for problem in refused(config, devices=2)] == ["trainer.n_gpus_per_node"]


def test_what_is_said_twice_alike_passes(tmp_path: Path) -> None:
    config = adopted(tmp_path, COLOCATED, "trainer.n_gpus_per_node=2", "seamless.layout=colocated")
    assert preflight(config, devices=2, accelerator=False) == []


def test_a_layout_against_the_tags(tmp_path: Path) -> None:
    config = adopted(tmp_path, COLOCATED, "seamless.layout=disaggregated")
    assert_refused(config, "seamless.layout", "disaggregated", "change the tags", devices=2)


def test_a_layout_against_the_tags_is_one_mistake(tmp_path: Path) -> None:
    config = adopted(tmp_path, TWO, GLOO, "seamless.layout=colocated")
    assert_refused(config, "seamless.layout", "colocated", "change the tags", devices=2)


def test_a_tag_that_reads_like_a_roles_brings_a_warning(tmp_path: Path) -> None:
    groups = "[{count: 1, devices: 1, tags: [train, rollout]}, {count: 1, devices: 1, tags: [rollout, trian, zone]}]"
    config = adopted(tmp_path, f"{KEY}={groups}", GLOO)
    (warning,) = preflight(config, devices=2, accelerator=False)
    assert warning.startswith(f"{KEY}[1].tags=['rollout', 'trian', 'zone']: trian is a tag of your own")
    assert warning.endswith("Did you mean train?")


def test_only_our_trainer_reads_tags(tmp_path: Path) -> None:
    config = adopted(tmp_path, COLOCATED, "trainer.v1.trainer_mode=sync")
    assert config.trainer.n_gpus_per_node == 1
    (problem,) = refused(config)
    assert problem.key == KEY and "trainer.v1.trainer_mode=seamless" in problem.way_out


def test_more_devices_than_there_are(tmp_path: Path) -> None:
    (problem,) = refused(adopted(tmp_path, TWO, GLOO), devices=1)
    assert problem.key == KEY and "2 devices (group0 1 + more 1) and there are 1" in problem.reason


def test_weights_must_reach_machines_that_only_generate(tmp_path: Path) -> None:
    (problem,) = refused(adopted(tmp_path, TWO), devices=2)
    assert problem.key == f"{ROLLOUT}.checkpoint_engine.backend" and problem.value == "naive"


def test_a_size_that_fits_no_group(tmp_path: Path) -> None:
    config = adopted(tmp_path, TWO, GLOO, f"{ROLLOUT}.tensor_model_parallel_size=2")
    (problem,) = refused(config, devices=2)
    assert problem.key == f"{ROLLOUT}.tensor_model_parallel_size" and "group group0" in problem.reason


def test_unused_machines_and_idle_ones_are_warned_of(tmp_path: Path) -> None:
    spare = "{name: spare, count: 1, devices: 1, tags: [reward]}"
    config = adopted(tmp_path, APART[:-1] + f", {spare}]", GLOO, "seamless.max_staleness=0")
    unused, idle = preflight(config, devices=3, accelerator=False)
    assert "no part of the run uses spare" in unused
    assert "seamless.max_staleness=0: leaves group1 idle whenever the trainer computes" in idle


def test_a_standalone_reward_model_needs_its_tag(tmp_path: Path) -> None:
    model = ("reward.reward_model.enable=True", "reward.reward_model.rollout.name=vllm")
    problems = refused(adopted(tmp_path, APART, GLOO, *model), devices=2)
    assert [problem.key for problem in problems] == [KEY] and "no machine has the tag reward" in problems[0].reason
    both = APART[:-1] + ", {count: 1, devices: 1, tags: [reward]}]"
    config = adopted(tmp_path, both, GLOO, *model)
    assert preflight(config, devices=3, accelerator=False) == []
    assert config.reward.reward_model.enable_resource_pool is True and config.reward.reward_model.nnodes == 1


def test_multiplexed_by_verls_fields(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, "seamless.layout=multiplexed", f"{ROLLOUT}.nnodes=1", GLOO)
    assert preflight(config, devices=2, accelerator=False) == []
    plan = plan_of(Settings.of(config, devices=2, accelerator=False))
    assert [replica.kind.value for replica in plan.replicas] == ["hybrid", "standalone"]
    none = tiny_run(tmp_path, "seamless.layout=multiplexed", GLOO)
    assert f"{ROLLOUT}.nnodes" in [problem.key for problem in refused(none, devices=2)]


def test_what_cannot_fit_the_devices_is_refused(tmp_path: Path) -> None:
    config = adopted(tmp_path, COLOCATED, "seamless.device_memory_gb=80")
    write_model(tmp_path / "model", **QWEN3_8B)
    (problem,) = refused(config, devices=2)
    assert problem.key == "actor_rollout_ref.actor.megatron.tensor_model_parallel_size"
    assert "a device of group group0 would need" in problem.reason and "has 80.0 GB" in problem.reason
    config.seamless.device_memory_gb = 600
    assert preflight(config, devices=2, accelerator=False) == []


def test_the_command_prints_the_same_plan_as_table_and_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEAMLESS_PLATFORM", "cpu")
    argv = ["plan", *tiny_files(tmp_path), *TINY_CLI, TWO, GLOO, "seamless.cpu.devices=2"]
    assert main(argv) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("multiplexed: 2 machines, 2 devices\n") and "1 hybrid, 1 standalone" in shown
    assert "more    1" in shown and f"{ROLLOUT}.nnodes=1" in shown
    assert main([*argv, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["format"] == 1 and told["plan"].keys() == {field.name for field in fields(Plan)}
    plan = told["plan"]
    assert (plan["layout"], plan["trainer"]["devices"]) == (Layout.MULTIPLEXED.value, [0])
    assert [each["kind"] for each in plan["replicas"]] == ["hybrid", "standalone"]


CLUSTER = (
    f"{KEY}=[{{count: 2, devices: 8, tags: [train, rollout]}},"
    " {count: 1, devices: 8, tags: [rollout], labels: {zone: b}}]"
)


def test_the_command_refuses_what_a_run_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *tiny_files(tmp_path), *TINY_CLI, TWO, "platform=cpu", "trainer.nnodes=7"]) == 2
    told = capsys.readouterr().err
    assert f"trainer.nnodes=7: contradicts {KEY}" in told and told.count("\n") == 1
    assert main(["plan", "trainer.nnode=1"]) == 2
    assert "trainer.nnode='1': is not a known key. Did you mean trainer.nnodes?" in capsys.readouterr().err
    assert main(["plan", "--config-name", "none"]) == 2
    assert "--config-name='none': there is no such config" in capsys.readouterr().err
    assert main(["plan", "--config-dir", str(tmp_path / "none")]) == 2
    assert "--config-dir" in capsys.readouterr().err


def test_a_plan_needs_none_of_its_machines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """No model, no data, more devices than here, and settings that a run would still have to be given."""
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    for platform, replicas in (("cpu", "16 hybrid, 8 standalone"), ("accelerator", "8 hybrid, 4 standalone")):
        assert main(["plan", f"platform={platform}", CLUSTER]) == 0
        told = capsys.readouterr()
        assert told.out.startswith("multiplexed: 3 machines, 24 devices\n") and replicas in told.out
        assert "memory: not estimated" in told.out
        assert told.err.startswith("warning: a run would be refused here, for ") and told.err.count("\n") == 1
        assert "data.train_files" in told.err and "actor_rollout_ref.model.path" in told.err
        assert (f"{KEY}," in told.err) == (platform == "cpu"), "where it is known how many devices there are"


def test_a_plan_for_other_machines_says_nothing_of_what_is_installed_here(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the check does, with the same option; on the CPU platform a plan has no warning of it, either."""
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    monkeypatch.setenv("SEAMLESS_PLATFORM", "cpu")
    monkeypatch.setattr(hosts, "installed", lambda verified: "99.0" if "vllm" in verified.distributions else None)
    assert main(["plan", "--platform", "accelerator", CLUSTER, "model_engine=megatron", "trainer.logger=[wandb]"]) == 0
    told = capsys.readouterr()
    assert "8 hybrid, 4 standalone" in told.out and told.err.count("\n") == 1
    assert not [key for key in ("vanilla_mbridge", "platform,", "platform;", "verl,", "logger") if key in told.err]
    assert main(["plan", CLUSTER]) == 0
    told = capsys.readouterr()
    assert "16 hybrid, 8 standalone" in told.out and told.err.count("\n") == 1 and "99.0" not in told.err
    assert "verl," in told.err, "on this platform a run would be refused here"
    assert main(["plan", "--platform=accelerater", CLUSTER]) == 2
    assert "--platform='accelerater': is not a platform. Did you mean accelerator" in capsys.readouterr().err
    for arguments in (["--platform=gpu"], ["platform=gpu"]):
        assert main(["plan", *arguments, CLUSTER]) == 2
        assert capsys.readouterr().err.endswith("Did you mean accelerator?\n")


def test_a_plan_is_refused_for_what_it_would_break(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = f"actor_rollout_ref.model.path={write_model(tmp_path / 'model', **QWEN3_8B)}"
    small = ("platform=accelerator", "algorithm.adv_estimator=grpo", "seamless.device_memory_gb=16", model, CLUSTER)
    assert main(["plan", *small]) == 2
    told = capsys.readouterr().err
    assert "would need" in told and "has 16.0 GB" in told
    assert main(["plan", *small, f"{ROLLOUT}.tensor_model_parallel_size=3"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "=3: a replica of 3 devices does not" in first and "=3: does not divide the model's 32" in second
    assert first.startswith("seamless-verl: ") and second.startswith("seamless-verl: ")
