"""The job that is compared: a recipe, a workload, a config file, or overrides alone; the command line of each run.

Every run is made by `seamless_verl.main_ppo`, which for verl's modes runs verl's own trainers and nothing of ours but
the supervisor that ends what a run leaves.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import yaml

from seamless_verl.errors import ConfigError
from seamless_verl.tools.compare.engine_baseline import LOG_FILE, measured_rates
from seamless_verl.tools.compare.running import METRICS_FILE
from seamless_verl.tools.compare.workloads import WORKLOADS, Workload, make_data, workload_overrides, write_loops

MAIN, PROBE = "seamless_verl.main_ppo", "seamless_verl.tools.compare.probe"
RESULT = "SEAMLESS_PROBE"  # names the file in which a probe writes what it found
RECIPES = Path(__file__).parents[3] / "recipes"
SCRIPT = "run.sh"
READS_MAIN = re.compile(r"^(?!\s*#).*\$\{?MAIN\b", re.MULTILINE)
SEARCH_PATH = "hydra.searchpath=[pkg://seamless_verl.config]"


@dataclass(frozen=True)
class Job:
    """What is compared: the recipe's script, or else a config file, or else verl's own defaults under our config.

    `overrides` are those of every arm; `data` is the folder in which a recipe or a workload keeps its model and its
    data. `rates` are tokens a second of an engine alone by samples in flight, where they were measured.
    """

    name: str
    script: Path | None
    config: Path | None
    overrides: tuple[str, ...]
    data: Path
    workload: Workload | None = None
    rates: Mapping[int, float] = field(default_factory=dict)

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
    """The job of a workload's name, of a recipe's name or folder, of a config file, or of overrides alone.

    Raises:
        ConfigError: there is no such recipe or file, or it cannot be checked before it is run.
    """
    data = out / "data"
    if target is None:
        return Job("job", None, None, tuple(overrides), data)
    if target in WORKLOADS:
        workload = WORKLOADS[target]
        return Job(target, None, None, (*workload_overrides(workload, data), *overrides), data, workload)
    for folder in (Path(target), RECIPES / target):
        if (folder / SCRIPT).is_file():
            check_script(folder / SCRIPT)
            return Job(folder.resolve().name, (folder / SCRIPT).resolve(), None, tuple(overrides), data)
    file = Path(target)
    if file.is_file() and file.suffix in (".yaml", ".yml"):
        check_config(file)
        return Job(file.stem, None, file.resolve(), tuple(overrides), data)
    names = ", ".join(sorted(script.parent.name for script in RECIPES.glob(f"*/{SCRIPT}") if reads_main(script)))
    way_out = f"Give a recipe ({names or 'a folder with a run.sh'}), a workload ({', '.join(WORKLOADS)}), "
    way_out += "a .yaml file, or KEY=VALUE alone"
    raise ConfigError("CONFIG|RECIPE", target, "is no recipe and no config file", way_out)


def with_data(job: Job, steps: int, *, validate: int, bound: bool, timeout_s: float) -> Job:
    """The job with what a workload needs before it is checked; any other one as it is.

    A tool of a workload takes as long as a turn does on this machine, for which an engine is measured alone, once in
    each folder; it is measured for the `bound` of the report, too.
    """
    workload = job.workload
    if workload is None:
        return job
    if validate:
        reason = "the lengths of a workload's responses are forced, so that there is nothing to learn"
        raise ConfigError("--validate", validate, reason, "Leave it out")
    make_data(workload, steps, job.data)
    rates = measured_rates(workload, job.data, timeout_s) if bound or workload.tool is not None else {}
    if workload.tool is not None:
        if not rates:
            reason = "the engine could not be measured alone, and so it is unknown how long a tool is to take"
            raise ConfigError("CONFIG|RECIPE", job.name, reason, f"See {job.data / LOG_FILE}")
        workload = workload.with_turn(workload.turn_s(rates))
    write_loops(workload, job.data)
    return replace(job, workload=workload, rates=rates)


def reads_main(script: Path) -> bool:
    """Whether the script runs what MAIN names, outside of its comments."""
    return READS_MAIN.search(script.read_text(encoding="utf-8", errors="replace")) is not None


def check_script(script: Path) -> None:
    """ConfigError for a script that would train where it is only to be checked."""
    if not reads_main(script):
        reason = "does not read MAIN, by which it is told to check its settings instead of training"
        raise ConfigError("CONFIG|RECIPE", str(script), reason, f'End it in -m "${{MAIN:-{MAIN}}}"')


def check_config(file: Path) -> None:
    """ConfigError for a file that hydra would not read: it takes names that end in .yaml, and a mapping."""
    if file.suffix != ".yaml":
        way_out = f"Name it {file.stem}.yaml"
        raise ConfigError("CONFIG|RECIPE", str(file), "hydra reads config files whose names end in .yaml", way_out)
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = f"is not YAML: {' '.join(str(error).split())}"
        raise ConfigError("CONFIG|RECIPE", str(file), reason, "Correct the file") from error
    except OSError as error:
        raise ConfigError("CONFIG|RECIPE", str(file), f"cannot be read: {error.strerror}", "Allow it") from error
    if not isinstance(tree, dict | None):
        raise ConfigError("CONFIG|RECIPE", str(file), "has no settings by name", "Write them as key: value")
