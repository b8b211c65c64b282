"""A run that joins a cluster brings nothing of the cluster's own: taken back where we set it, refused where a user."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf
from support.config import compose_ours, tiny_run

from seamless_verl.config.checks import find_problems
from seamless_verl.config.checks.devices import check_cores, check_devices
from seamless_verl.config.joining import COMMAND, OF_THE_CLUSTER, PIN_VARIABLE, RAY_INIT, adopt_cluster, check_joined
from seamless_verl.config.roles import joins_cluster, starts_cluster
from seamless_verl.config.settings import Settings
from seamless_verl.platform.cores import PIN
from seamless_verl.run_folder import writes_locally

ADDRESS = "10.0.0.1:6379"
CPU = ("platform=cpu",)


def settings_of(config: object, devices: int | None = None) -> Settings:
    return Settings.of(config, devices=devices, accelerator=False)  # type: ignore[arg-type]


def test_what_the_cpu_platform_sets_of_a_cluster_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose_ours(*CPU)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    adopt_cluster(config)
    assert config == compose_ours(*CPU), "a run that starts its own cluster"
    monkeypatch.setenv("RAY_ADDRESS", ADDRESS)
    assert {problem.key for problem in check_joined(settings_of(config))} > {f"{RAY_INIT}.num_cpus"}
    adopt_cluster(config)
    assert check_joined(settings_of(config)) == []
    assert [OmegaConf.select(config, f"{RAY_INIT}.{name}") for name in OF_THE_CLUSTER] == [None] * len(OF_THE_CLUSTER)
    assert OmegaConf.select(config, COMMAND) is None and OmegaConf.select(config, PIN_VARIABLE) == "0"
    assert PIN_VARIABLE.endswith(f".{PIN}")


def test_what_the_user_set_of_a_cluster_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", ADDRESS)
    overrides = (
        f"{RAY_INIT}.num_cpus=4",
        f"+{RAY_INIT}.resources={{a: 1}}",
        f"{COMMAND}=python",
        f"+{PIN_VARIABLE}='1'",
    )
    config = compose_ours(*CPU, *overrides)
    adopt_cluster(config, overrides)
    found = {problem.key: problem.way_out for problem in check_joined(settings_of(config))}
    assert found == {
        f"{RAY_INIT}.num_cpus": "Remove it, or start the nodes with ray start --num-cpus",
        f"{RAY_INIT}.resources": "Remove it, or start the nodes with ray start --resources",
    }
    assert OmegaConf.select(config, COMMAND) == "python" and OmegaConf.select(config, PIN_VARIABLE) == "1"


def test_an_address_among_the_settings_joins_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = compose_ours(*CPU, f"+{RAY_INIT}.address=auto")
    adopt_cluster(config)
    assert check_joined(settings_of(config)) == []


def test_a_cluster_of_its_own_is_joined_by_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`local` starts one, whatever RAY_ADDRESS names and whatever runs here."""
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text(ADDRESS)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    config = tiny_run(tmp_path, f"{RAY_INIT}.num_cpus=4", f"{RAY_INIT}.address=local")
    for variable in ("", "local", ADDRESS):
        monkeypatch.setenv("RAY_ADDRESS", variable)
        assert check_joined(settings_of(config)) == [] and writes_locally(config)
        assert not joins_cluster(settings_of(config)) and starts_cluster(settings_of(config))
    unnamed = tiny_run(tmp_path)
    for variable, joins, starts in (("local", False, True), ("", False, False), (ADDRESS, True, False)):
        monkeypatch.setenv("RAY_ADDRESS", variable)
        assert joins_cluster(settings_of(unnamed)) is joins and starts_cluster(settings_of(unnamed)) is starts


def test_an_accelerators_config_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", ADDRESS)
    config = compose_ours("platform=accelerator", f"{RAY_INIT}.num_cpus=4")
    adopt_cluster(config)
    assert [problem.key for problem in check_joined(settings_of(config))] == [f"{RAY_INIT}.num_cpus"]


def test_cores_of_this_machine_are_not_those_of_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_run(tmp_path, *CPU, "seamless.cpu.devices=999", "trainer.n_gpus_per_node=500")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    alone = find_problems(settings_of(config, devices=2), [check_devices, check_cores])
    assert {problem.key for problem in alone} == {"trainer.n_gpus_per_node", "seamless.cpu.devices"}
    monkeypatch.setenv("RAY_ADDRESS", ADDRESS)
    assert find_problems(settings_of(config, devices=2), [check_devices, check_cores]) == []
