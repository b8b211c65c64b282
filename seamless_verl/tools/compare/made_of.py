"""What a run is made of beside its command line: its composed config, its recipe's files, versions and code.

A run of an earlier comparison is taken instead of a new one only where all of it is the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from seamless_verl.tools.compare.job import Job
from seamless_verl.tools.compare.surroundings import code_state, versions

OWN_PLACES = {"trainer": ("default_local_dir", "project_name", "experiment_name"), "data": ("seed",)}
"""Keys that say where a run writes, and its seed, which its command line has: an arm is probed for one seed only."""

SET_HERE = {"DATA", "HF_HUB_OFFLINE", "MAIN", "PYTHON"}
"""Variables of a recipe's script that a comparison sets itself, or that do not change what is made."""


def made_of(config: Mapping[str, Any], job: Job) -> dict[str, Any]:
    """By kind; of config and files the SHA-256."""
    files = {} if job.script is None else files_beside(job.script)
    read = {} if job.script is None else environment_of(job.script.read_text())
    made = {"config": config_hash(config), "files": files, "versions": versions(), "code": code_state()}
    return made | {"environment": read}


def environment_of(script: str) -> dict[str, str]:
    """The variables that are set of those that a recipe's script reads, such as how many questions it makes."""
    names = sorted(set(re.findall(r"\$\{([A-Z_]+):-", script)) - SET_HERE)
    return {name: os.environ[name] for name in names if name in os.environ}


def config_hash(config: Mapping[str, Any]) -> str:
    """Of a composed config without `OWN_PLACES`."""
    kept = deepcopy(dict(config))
    for node, names in OWN_PLACES.items():
        for name in names:
            kept.get(node, {}).pop(name, None)
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()


def files_beside(script: Path) -> dict[str, str]:
    """The files in a recipe's folder, itself among them, by name; not those in folders below it."""
    files = sorted(path for path in script.parent.iterdir() if path.is_file())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
