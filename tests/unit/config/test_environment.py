"""What a run takes along of the command's environment for its agents."""

from __future__ import annotations

from pathlib import Path

from omegaconf import OmegaConf

from seamless_verl.config.checks.agents import LOOPS, variables_of
from seamless_verl.platform.adaptation import ActorClassWith


def test_what_the_file_of_agent_loops_reads_and_is_set_here(tmp_path: Path) -> None:
    path = tmp_path / "agents.yaml"
    path.write_text('- {env: {A: "${oc.env:AGENT_ENV}/bin", D: "${oc.env:DOCKER,docker}", K: "${oc.env: KEY}"}}')
    config = OmegaConf.create()
    OmegaConf.update(config, LOOPS, str(path))
    here = {"AGENT_ENV": "/shared/agents", "KEY": "secret", "OTHER": "x"}
    assert variables_of(config, here) == {"AGENT_ENV": "/shared/agents", "KEY": "secret"}
    for none in ("", None):
        OmegaConf.update(config, LOOPS, none)
        assert variables_of(config, here) == {}


def test_an_actor_class_gets_them_whoever_starts_it() -> None:
    class Started:
        def __init__(self, **options: object) -> None:
            self.chosen = options

        def options(self, **options: object) -> Started:
            return Started(**options)

        def remote(self, *arguments: object, **named: object) -> tuple[object, ...]:
            return self.chosen, arguments, named

    given = ActorClassWith(Started(), variables={"A": "1"})
    assert given.options(name="x").remote(1, b=2) == ({"name": "x"}, (1,), {"b": 2, "variables": {"A": "1"}})
    assert given.remote() == ({}, (), {"variables": {"A": "1"}})
