"""Commands and limits that cannot work are refused before anything runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.paths import ROOT

from seamless_verl.agents.command import INHERITED, AgentCommand
from seamless_verl.agents.limits import CommandLimits
from seamless_verl.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"command": ""}, "command=''"),
        ({"command": []}, "command=\\[\\]"),
        ({"folder": Path("/nowhere")}, "folder='/nowhere'"),
        ({"env": {"OPENAI_BASE_URL": "x"}}, "env='OPENAI_BASE_URL'"),
        ({"env": {"HOME": "x"}}, "env='HOME'"),
        ({"keep_failed": __file__}, f"keep_failed='{__file__}': is a file"),
    ],
)
def test_mistakes_are_refused_before_anything_runs(options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        AgentCommand(**({"command": "true"} | options))  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"wall_s": 0.0}, {"wall_s": float("nan")}, {"cpu_s": 0}, {"output_bytes": -1}])
def test_limits_that_cannot_hold_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"limits.{next(iter(wrong))}="):
        CommandLimits(**wrong)  # type: ignore[arg-type]


def test_the_page_names_what_a_command_inherits() -> None:
    text = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
    named = text.partition("a command inherits these alone:")[2].partition("`env` adds")[0]
    assert sorted(re.findall(r"`(\w+)`", named)) == sorted(INHERITED)
