"""A task in Harbor's layout: what of it this recipe reads, and what is refused by its name.

task.toml, instruction.md, environment/ with a Dockerfile, tests/ with test.sh; solution/ is not read.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from seamless_verl.errors import ConfigError

UNSERVED = {
    "environment": {"healthcheck": "a health check", "mcp_servers": "MCP servers", "gpus": "GPUs", "tpu": "a TPU"},
    "verifier": {"environment": "a verifier in an environment of its own"},
}
"""What the tables of task.toml may ask for that is not served."""
READ: dict[str, dict[str, Any]] = {
    "agent": {"timeout_sec": float},
    "verifier": {"timeout_sec": float, "env": dict},
    "environment": dict.fromkeys(("docker_image", "workdir", "os"), str)
    | {"build_timeout_sec": float, "memory_mb": int, "env": dict},
}
"""What is read of the tables of task.toml, with its type."""
TASK_FILE = msgspec.defstruct(
    "TaskFile",
    [
        (table, msgspec.defstruct(table, [(key, kind, None) for key, kind in keys.items()]), None)
        for table, keys in READ.items()
    ],
)
NO_STEPS = {"FROM", "CMD", "LABEL", "EXPOSE", "MAINTAINER"}  # of a Dockerfile, where nothing of the image is used
STEPS = {"WORKDIR", "COPY", "ENV"}


@dataclass(frozen=True)
class HarborTask:
    """`agent_s` None leaves the agent's time to the run; the variables of `env` are the agent's and the verifier's."""

    folder: Path
    instruction: str
    agent_s: float | None
    verifier_s: float
    build_s: float
    image: str | None
    workdir: str | None
    memory_mb: int | None
    env: dict[str, str]
    verifier_env: dict[str, str]

    @property
    def dockerfile(self) -> Path:
        return self.folder / "environment" / "Dockerfile"


def read_task(folder: Path) -> HarborTask:
    """Raises ConfigError for what is no task, or one that is not served."""
    try:
        facts = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
        instruction = (folder / "instruction.md").read_text(encoding="utf-8").strip()
        msgspec.convert(facts, TASK_FILE)
    except (OSError, ValueError, msgspec.ValidationError) as error:
        raise ConfigError("task", str(folder), f"is none of Harbor's: {error}", "Correct it, or take it out") from error
    agent, verifier, environment = (facts.get(name, {}) for name in ("agent", "verifier", "environment"))
    unserved = [what for table, keys in UNSERVED.items() for key, what in keys.items() if facts.get(table, {}).get(key)]
    apart = verifier.get("environment_mode") == "separate"
    more = {
        "several steps": facts.get("steps"),
        "docker-compose.yaml": (folder / "environment" / "docker-compose.yaml").exists(),
        "a verifier in an environment of its own": apart and not verifier.get("environment"),
        "another system than Linux": environment.get("os", "linux").lower() != "linux",
        "a tests/test.sh": not (folder / "tests" / "test.sh").is_file(),
        "an image": not environment.get("docker_image") and not (folder / "environment" / "Dockerfile").is_file(),
    }
    unserved += [what for what, asked in more.items() if asked]
    if unserved:
        raise ConfigError(
            "task",
            str(folder),
            f"needs {', '.join(unserved)}, which is not served or missing",
            "Take it out of the folder of tasks",
        )
    return HarborTask(
        folder,
        instruction,
        agent.get("timeout_sec"),
        verifier.get("timeout_sec", 600.0),
        environment.get("build_timeout_sec", 600.0),
        environment.get("docker_image"),
        environment.get("workdir"),
        environment.get("memory_mb"),
        resolved(environment.get("env", {}), folder),
        resolved(verifier.get("env", {}), folder),
    )


def resolved(env: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """The variables with `${NAME}` and `${NAME:-default}` as this process has them; raises ConfigError for others."""

    def value(found: re.Match[str]) -> str:
        given = os.environ.get(found[1], found[2])
        if given is None:
            raise ConfigError("task", str(folder), f"its env needs ${found[1]}", f"Set {found[1]}")
        return given

    return {name: re.sub(r"\$\{(\w+)(?::-([^}]*))?\}", value, str(text)) for name, text in env.items()}


def plain_steps(task: HarborTask) -> Iterator[tuple[str, list[str]]]:
    """WORKDIR, COPY and ENV of the Dockerfile with their words; raises ConfigError where it needs a container."""
    text = task.dockerfile.read_text(encoding="utf-8") if task.dockerfile.exists() else f"FROM {task.image}"
    for line in re.sub(r"\\\s*\n", " ", text).splitlines():
        step, _, rest = line.strip().partition(" ")
        if not step or step.startswith("#") or step.upper() in NO_STEPS:
            continue
        try:
            words = list(map(str, json.loads(rest))) if rest.lstrip().startswith("[") else shlex.split(rest)
        except ValueError:  # a quote without its other one
            words = []
        if step.upper() not in STEPS or not words or any(word.startswith("--") or "$" in word for word in words):
            reason = f"its Dockerfile has `{line.strip():.60}`, which takes a container"
            raise ConfigError("task", str(task.folder), reason, "Run it where docker or podman runs, or take it out")
        yield step.upper(), words
