"""What a run in a joined cluster takes along of the command's environment."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from seamless_verl.config.environment import send_environment, variables_of


def config_of(loops: str | None, runtime_env: object = None) -> OmegaConf:
    made = OmegaConf.create(
        {
            "data": {"train_files": "${oc.env:DATA_HERE}/train.parquet"},
            "ray_kwargs": {"ray_init": {"num_cpus": None}},
            "actor_rollout_ref": {"rollout": {"agent": {"agent_loop_config_path": loops}}},
        }
    )
    if runtime_env is not None:
        made.ray_kwargs.ray_init.runtime_env = runtime_env
    OmegaConf.set_struct(made, True)
    return made


@pytest.fixture
def loops(tmp_path: Path) -> str:
    path = tmp_path / "agents.yaml"
    path.write_text('- {env: {A: "${oc.env:AGENT_ENV}/bin", P: "${oc.env:PATH}", D: "${oc.env:DOCKER,docker}"}}')
    return str(path)


def test_a_config_is_read_where_the_command_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA_HERE", "/data")
    config = config_of(None)
    send_environment(config, {})
    monkeypatch.delenv("DATA_HERE")
    assert config.data.train_files == "/data/train.parquet"
    assert "runtime_env" not in config.ray_kwargs.ray_init


def test_what_the_agents_read_goes_to_all_workers(monkeypatch: pytest.MonkeyPatch, loops: str) -> None:
    monkeypatch.setenv("DATA_HERE", "/data")
    here = {"AGENT_ENV": "/shared/agents", "PATH": "/bin", "OTHER": "x"}
    assert variables_of(config_of(loops), here) == {"AGENT_ENV": "/shared/agents"}, "each machine has its own PATH"
    config = config_of(loops)
    send_environment(config, here)
    assert config.ray_kwargs.ray_init.runtime_env == {"env_vars": {"AGENT_ENV": "/shared/agents"}}
    own = config_of(loops, {"pip": ["x"], "env_vars": {"AGENT_ENV": "/mine", "B": "1"}})
    send_environment(own, here | {"DOCKER": "podman"})
    variables = {"AGENT_ENV": "/mine", "DOCKER": "podman", "B": "1"}
    assert own.ray_kwargs.ray_init.runtime_env == {"pip": ["x"], "env_vars": variables}
