"""The user's own reward function: that verl will find its file and its name.

Sources: verl/trainer/ppo/reward.py `get_custom_reward_fn`, verl/utils/import_utils.py `load_module`,
verl/experimental/reward_loop/reward_loop.py `migrate_legacy_reward_impl`.
"""

from __future__ import annotations

import os

from seamless_verl.config.checks.problem import Problem
from seamless_verl.config.checks.roles import brings_code
from seamless_verl.config.checks.settings import Settings, check
from seamless_verl.config.checks.sources import check_dotted, check_name
from seamless_verl.errors import ConfigError

FUNCTION = "reward.custom_reward_function"
LEGACY = "custom_reward_function"  # verl copies it over the other when it says anything
PACKAGE, FILE = "pkg://", "file://"


@check
def check_reward_function(settings: Settings) -> list[Problem]:
    """A file, or a module as `pkg://package.module`, that defines the function."""
    node = LEGACY if any(settings.get(LEGACY, {}).values()) else FUNCTION
    if not settings.get(f"{node}.path"):
        return []
    path, name = settings.text(f"{node}.path"), settings.text(f"{node}.name")
    if path.startswith(PACKAGE):
        _in_package(settings, node, path, name)
    else:
        _in_file(settings, node, path, name)
    return []


def _in_package(settings: Settings, node: str, path: str, name: str) -> None:
    module = path.removeprefix(PACKAGE).replace("/", ".")
    if not brings_code(settings):
        way_out = f"Install it, put its folder on PYTHONPATH, or name a file: {node}.path=<file>.py"
        check_dotted(f"{node}.path", path, f"{module}.{name}", way_out)


def _in_file(settings: Settings, node: str, path: str, name: str) -> None:
    key, file = f"{node}.path", path.removeprefix(FILE)
    if brings_code(settings) and not os.path.isabs(file):
        return
    if not os.path.isfile(file):
        there = os.path.isfile(os.path.expanduser(file))
        way_out = f"Set {key}={os.path.expanduser(file)}" if there else f"Set {key} to a .py file that defines {name}"
        reason = "the ~ is not expanded" if there else f"there is no such file (looked for from {os.getcwd()})"
        raise ConfigError(key, path, reason, way_out)
    if not file.endswith(".py"):
        raise ConfigError(key, path, "is not a .py file", f"Set {key} to a .py file that defines {name}")
    check_name(f"{node}.name", name, path, file, name)
