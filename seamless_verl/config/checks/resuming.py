"""Where a run begins and where it ends.

Sources: verl/trainer/ppo/v1/trainer_base.py `_load_checkpoint`, `_init_dataloader` and `fit`.
"""

from __future__ import annotations

import os
from pathlib import Path

from seamless_verl.config.checks.folders import nearest_there, why_not_in
from seamless_verl.config.checks.problem import Problem
from seamless_verl.config.checks.roles import joins_cluster
from seamless_verl.config.checks.settings import Settings, check
from seamless_verl.config.schema import nearest
from seamless_verl.errors import ConfigError
from seamless_verl.locks import is_locked

MODE, PATH = "trainer.resume_mode", "trainer.resume_from_path"
STEPS, EPOCHS = "trainer.total_training_steps", "trainer.total_epochs"
MODES = ("auto", "disable", "resume_path")
FOLDER = "trainer.default_local_dir"
PREFIX = "global_step_"
IN_USE = "another run writes there now"
ELSEWHERE = f"Wait for it or stop it, or set {FOLDER} to another folder"


@check
def check_resume(settings: Settings) -> list[Problem]:
    """A known mode, and a checkpoint to resume from in the one that names it."""
    mode, path = settings.get(MODE, "auto"), settings.get(PATH)
    if mode not in MODES:
        return [Problem(MODE, mode, "is not a way to resume", nearest(str(mode), list(MODES)))]
    if mode == "resume_path":
        _checkpoint(settings.text(PATH))
    elif path is not None:
        reason = f"is not read while {MODE}={mode}"
        return [Problem(PATH, path, reason, f"Set {MODE}=resume_path to resume from it", warning=True)]
    return []


@check
def check_folder(settings: Settings) -> list[Problem]:
    """One that can be made and written, and that no other run writes. In a cluster it may be on another machine."""
    value = settings.get(FOLDER)
    if not isinstance(value, str) or "://" in value or joins_cluster(settings):
        return []
    path = Path(value).absolute()
    there = nearest_there(path)
    if (why := why_not_in(there)) is not None:
        return [Problem(FOLDER, value, f"cannot be made in {there}: {why}", f"Set {FOLDER} to a folder of yours")]
    return [Problem(FOLDER, value, IN_USE, ELSEWHERE)] if _in_use(path) else []


@check
def check_steps(settings: Settings) -> list[Problem]:
    """At least one step of training."""
    settings.integer(EPOCHS, 1)
    steps = settings.get(STEPS)
    if steps is None or (isinstance(steps, int) and not isinstance(steps, bool) and steps > 0):
        return []
    way_out = f"Set {STEPS}=1 or more, or {STEPS}=null to train for {EPOCHS}"
    return [Problem(STEPS, steps, "must be a whole number of at least 1, or null", way_out)]


def _in_use(folder: Path) -> bool:
    """Where it cannot be told, the run will say so."""
    try:
        return is_locked(folder)
    except OSError:
        return False


def _checkpoint(path: str) -> None:
    """ConfigError when it is no checkpoint; verl takes the step from behind the last `global_step_`."""
    folder = path.rstrip("/")
    _, found, step = folder.rpartition(PREFIX)
    if not found or not step.isdigit():
        way_out = f"Set {PATH} to a checkpoint's own folder, .../{PREFIX}<step>"
        raise ConfigError(PATH, path, f"does not end in {PREFIX}<step>", _instead(folder) or way_out)
    if not os.path.isdir(folder):
        raise ConfigError(PATH, path, "there is no such folder", _instead(os.path.dirname(folder)) or _way_out())
    if not os.path.isdir(os.path.join(folder, "actor")):
        raise ConfigError(PATH, path, "is no checkpoint: it has no folder actor", _way_out())


def _instead(folder: str) -> str | None:
    """The newest checkpoint in a folder, when it has one."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    steps = [int(name.removeprefix(PREFIX)) for name in names if name.removeprefix(PREFIX).isdigit()]
    return f"The newest there is {PATH}={os.path.join(folder, f'{PREFIX}{max(steps)}')}" if steps else None


def _way_out() -> str:
    return f"Set {PATH} to a folder that a run saved, or {MODE}=auto to go on from trainer.default_local_dir"
