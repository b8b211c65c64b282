"""What the agents of the swe_agent_32b recipe are started with."""

from __future__ import annotations

import pytest
from omegaconf import DictConfig, OmegaConf
from support.paths import RECIPES

from seamless_verl.agents.settings import CommandSettings, read_settings


def test_the_container_program_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command inherits few variables, so the loop's `env` has it, also where it is not set."""
    monkeypatch.setenv("RECIPE", "recipe")
    monkeypatch.setenv("AGENT_ENV", "agents")

    def program() -> str:
        (entry,) = OmegaConf.load(RECIPES / "swe_agent_32b" / "agents.yaml")
        assert isinstance(entry, DictConfig)
        resolved = OmegaConf.to_container(entry, resolve=True)
        assert isinstance(resolved, dict)
        return read_settings(
            CommandSettings, {str(key): value for key, value in resolved.items()}, key="entry"
        ).agent_command.env["DOCKER"]

    monkeypatch.delenv("DOCKER", raising=False)
    assert program() == "docker"
    monkeypatch.setenv("DOCKER", "podman")
    assert program() == "podman"
