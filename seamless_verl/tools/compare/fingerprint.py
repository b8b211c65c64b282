"""What a run is made of beside its command line: its composed config, its job's files, versions and code.

A run of an earlier comparison is taken instead of a new one only where all of it is the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from seamless_verl.tools.compare.job import Job
from seamless_verl.tools.compare.machine import code_state, versions
from seamless_verl.tools.compare.workloads import LOOPS_FILE

OWN_PLACES = {"trainer": ("default_local_dir", "project_name", "experiment_name"), "data": ("seed",)}
"""Keys that say where a run writes, and its seed, which its command line has: an arm is probed for one seed only."""

SET_HERE = {"DATA", "HF_HUB_OFFLINE", "MAIN", "PYTHON"}
"""Variables of a recipe's script that a comparison sets itself, or that do not change what is made."""


def fingerprint(config: Mapping[str, Any], job: Job) -> dict[str, Any]:
    """By kind; of config and files the SHA-256."""
    folder = [] if job.script is None else sorted(path for path in job.script.parent.iterdir() if path.is_file())
    files = folder if job.workload is None else [job.data / LOOPS_FILE]
    return {
        "config": config_hash(config),
        "files": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files},
        "versions": versions(),
        "code": code_state(),
        "environment": {} if job.script is None else environment_of(job.script.read_text()),
    }


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
