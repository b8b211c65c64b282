"""The job that is compared: a recipe's folder, a config file, or overrides alone; and the command line of each run.

Every run is made by `seamless_verl.main_ppo`, which for verl's modes runs verl's own trainers and nothing of ours but
the supervisor that ends what a run leaves.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from seamless_verl.compare.running import METRICS_FILE
from seamless_verl.errors import ConfigError

MAIN, PROBE = "seamless_verl.main_ppo", "seamless_verl.compare.probe"
RESULT = "SEAMLESS_PROBE"  # names the file in which a probe writes what it found
RECIPES = Path(__file__).parents[2] / "recipes"
SCRIPT = "run.sh"
SEARCH_PATH = "hydra.searchpath=[pkg://seamless_verl.config]"


@dataclass(frozen=True)
class Job:
    """What is compared: the recipe's script, or else a config file, or else verl's own defaults under our config.

    `overrides` are the user's, in every arm; `data` is the folder in which a recipe keeps its model and its data.
    """

    name: str
    script: Path | None
    config: Path | None
    overrides: tuple[str, ...]
    data: Path

    def command(self, overrides: Sequence[str]) -> list[str]:
        """The command line of a run; hydra takes the last one of two values for a key."""
        all_overrides = [*self.overrides, *overrides]
        if self.script is not None:
            return [str(self.script), *all_overrides]
        command = [sys.executable, "-W", "ignore", "-m", MAIN]
        if self.config is not None:
            command += ["--config-dir", str(self.config.parent), "--config-name", self.config.stem, SEARCH_PATH]
        return [*command, *all_overrides]

    def probe(self, overrides: Sequence[str]) -> list[str]:
        """The command line that checks the same run and starts nothing; a recipe's script reads MAIN instead."""
        return [PROBE if part == MAIN else part for part in self.command(overrides)]

    def own_environment(self, folder: Path) -> dict[str, str]:
        """Where the run's metrics are, and what a recipe's script reads: the folder of its data, and what runs it."""
        own = {"VERL_FILE_LOGGER_PATH": str(folder / METRICS_FILE)}
        recipes = {"DATA": str(self.data), "PYTHON": sys.executable, "MAIN": MAIN}
        return own | (recipes if self.script is not None else {})

    def environment(self, folder: Path) -> dict[str, str]:
        """What the user exported, and what the run has of its own."""
        offline = {"HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1")}
        return {**os.environ, **offline, **self.own_environment(folder)}

    def probe_environment(self, folder: Path, result: Path) -> dict[str, str]:
        """The same for `probe`, whose result is written to a file."""
        return self.environment(folder) | {"MAIN": PROBE, RESULT: str(result)}


def job_named(target: str | None, overrides: Sequence[str], out: Path) -> Job:
    """The job of a recipe's name or folder, of a config file, or of overrides alone.

    Raises:
        ConfigError: there is no such recipe or file.
    """
    data = out / "data"
    if target is None:
        return Job("job", None, None, tuple(overrides), data)
    for folder in (Path(target), RECIPES / target):
        if (folder / SCRIPT).is_file():
            return Job(folder.resolve().name, (folder / SCRIPT).resolve(), None, tuple(overrides), data)
    file = Path(target)
    if file.is_file() and file.suffix in (".yaml", ".yml"):
        return Job(file.stem, None, file.resolve(), tuple(overrides), data)
    names = ", ".join(sorted(script.parent.name for script in RECIPES.glob(f"*/{SCRIPT}")))
    way_out = f"Give a recipe ({names or 'a folder with a run.sh'}), a .yaml file, or KEY=VALUE alone"
    raise ConfigError("CONFIG|RECIPE", target, "is no recipe and no config file", way_out)
