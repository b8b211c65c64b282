"""The gateway, and agent loops that cannot run without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from seamless_verl.config.checks.problem import Problem
from seamless_verl.config.checks.settings import Settings, check

OURS = "seamless_verl.trainer.data_plane."
LOOPS = "actor_rollout_ref.rollout.agent.agent_loop_config_path"
ENABLED = "seamless.gateway.enabled"


@check
def check_gateway(settings: Settings) -> list[Problem]:
    """It runs in our trainer; loops that run agents against it need it."""
    enabled, seamless = settings.seamless.gateway.enabled, settings.mode == "seamless"
    if enabled and not seamless:
        reason = "only the seamless trainer starts the gateway"
        return [Problem(ENABLED, True, reason, "Set trainer.v1.trainer_mode=seamless, or leave the gateway out")]
    path = settings.get(LOOPS)
    if path is None or enabled or not any(str(target).startswith(OURS) for target in targets(Path(path))):
        return []
    return [Problem(LOOPS, path, "it names agent loops that need the gateway", f"Set {ENABLED}=true")]


def targets(path: Path) -> list[Any]:
    """The classes that a file of agent loops names; what cannot be read here verl will refuse."""
    if not path.is_file():
        return []
    try:
        loops = yaml.safe_load(path.read_text())
    except yaml.YAMLError:
        return []
    return [loop.get("_target_") for loop in loops or [] if isinstance(loop, dict)]
