"""The variables of the command's environment that the file of agent loops reads (`${oc.env:NAME}`).

verl reads that file in its agent loop workers. In a cluster that was there before, these have the environment of the
command that started their node, so the values go with the task runner to the workers. They are kept out of the config,
which is printed and given to trackers: one may be a key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from omegaconf import DictConfig, OmegaConf

from seamless_verl.config.checks.agents import LOOPS, find_file

READ = re.compile(r"oc\.env:\s*(\w+)")


def variables_of(config: DictConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that are set here and that the file of agent loops reads."""
    given = OmegaConf.select(config, LOOPS)
    if not given:
        return {}
    text = find_file(LOOPS, str(given), "a YAML file of agent loops").read_text(encoding="utf-8")
    return {name: environ[name] for name in READ.findall(text) if name in environ}
