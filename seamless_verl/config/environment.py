"""The variables of the command's environment that a config reads, where the run joins a cluster.

There a worker has the environment of the command that started its node, not of this one. So a config is resolved before
it is sent, and what the file of agent loops reads (`${oc.env:NAME}`), which verl reads in its workers, goes with them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from seamless_verl.config.checks.agents import LOOPS, find_file

READ = re.compile(r"oc\.env:\s*(\w+)")
PATHS = ("HOME", "LD_LIBRARY_PATH", "PATH", "PWD", "PYTHONPATH", "TMPDIR")
OF_A_MACHINE = frozenset((*PATHS, "HOSTNAME", "LANG", "LOGNAME", "SHELL", "USER"))
"""Each node has its own, which those of another would break."""


def variables_of(config: DictConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that are set here and that the file of agent loops reads, but for those of a machine."""
    given = OmegaConf.select(config, LOOPS)
    if given is None:
        return {}
    text = find_file(LOOPS, str(given), "a YAML file of agent loops").read_text(encoding="utf-8")
    return {name: environ[name] for name in READ.findall(text) if name in environ and name not in OF_A_MACHINE}


def send_environment(config: DictConfig, environ: Mapping[str, str]) -> None:
    """Resolves the config, and has Ray set these variables in all workers of the run, unless the config sets them."""
    OmegaConf.resolve(config)
    variables = variables_of(config, environ)
    if not variables:
        return
    start: Any = config.ray_kwargs.ray_init
    with open_dict(start):
        given = start.get("runtime_env") or {}
        start.runtime_env = {**given, "env_vars": {**variables, **(given.get("env_vars") or {})}}
