"""Checks of the checkpoint that a run resumes from: it is whole and finite, and fits the run's engine and adapter.

Sources: verl/trainer/ppo/v1/trainer_base.py `_load_checkpoint`, verl/utils/checkpoint/checkpoint_manager.py.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from seamless_verl.config.checks.files import ELSEWHERE, LOADED, MODE, PATH, STEPS
from seamless_verl.config.paths import looking_at
from seamless_verl.config.roles import joins_cluster, uses_megatron
from seamless_verl.config.settings import Problem, Settings, check
from seamless_verl.config.verl_keys import ENGINE, FOLDER
from seamless_verl.errors import ConfigError
from seamless_verl.runtime.checkpoint_marker import (
    RESUME_ANOTHER,
    saved_steps,
    step_folder,
    tracked_step,
    weights_not_finite,
)
from seamless_verl.runtime.fields import nearest

MODES = ("auto", "disable", "resume_path")
NOT_FINITE = "has weights that are not finite numbers, in"
PREFIX = "global_step_"
ENGINES = {"fsdp": "FSDP", "fsdp2": "FSDP", "megatron": "Megatron"}  # of a strategy, as checkpoints tell them apart
NAMES = {"FSDP": "dp", "Megatron": "megatron"}
RANK, FSDP_RANK = "actor_rollout_ref.model.lora.rank", "actor_rollout_ref.model.lora_rank"
RANKS = ("lora_train_meta.json", "model/huggingface/adapter/adapter_config.json")


@check
def check_resume(settings: Settings) -> list[Problem]:
    """A known mode, and a checkpoint to resume from in the mode that names one."""
    mode, path = settings.get(MODE, "auto"), settings.get(PATH)
    if mode not in MODES:
        return [Problem(MODE, mode, "is not a way to resume", nearest(str(mode), list(MODES)))]
    if mode == "resume_path":
        with looking_at(PATH, path):
            _checkpoint(settings.text(PATH))
    elif path is not None:
        reason = f"is not read while {MODE}={mode}"
        return [Problem(PATH, path, reason, f"Set {MODE}=resume_path to resume from it", warning=True)]
    return _newest(settings) if mode == "auto" else []


def _newest(settings: Settings) -> list[Problem]:
    """Of the checkpoint that verl resumes from by itself: it is whole and finite, of the run's engine, and leaves
    something to train."""
    folder = settings.get(FOLDER)
    if not isinstance(folder, str) or "://" in folder or joins_cluster(settings):  # it may be on another machine
        return []
    if (step := _tracked(Path(folder))) is None:
        return []
    newest, found = step_folder(Path(folder), step), list[Problem]()
    with looking_at(FOLDER, folder, newest.name):
        if not (newest / "actor").is_dir():
            return [_without_actor(folder, newest)]
        if (weights := weights_not_finite(newest)) is not None:
            reason = f"its newest checkpoint, from which the run would resume, {NOT_FINITE} {weights}"
            return [Problem(FOLDER, folder, reason, RESUME_ANOTHER)]
        engine = _engine_of(newest / "actor")
    strategy = settings.text("actor_rollout_ref.actor.strategy", "")
    loads = settings.get("actor_rollout_ref.actor.checkpoint.load_contents", LOADED)
    if engine is not None and strategy in ENGINES and ENGINES[strategy] != engine and set(LOADED) & set(loads):
        reason = f"its newest checkpoint {newest.name} is {engine}'s, which the run's engine {strategy} cannot load"
        found.append(Problem(FOLDER, folder, reason, f"Set {ELSEWHERE}, or {ENGINE}={NAMES[engine]}"))
    found += _of_another_rank(settings, newest)
    last = settings.get(STEPS)
    if isinstance(last, int) and step >= last and not settings.flag("trainer.val_only"):
        reason = f"leaves nothing to train after {newest}, from which the run would resume"
        found.append(
            Problem(STEPS, last, reason, f"Set {STEPS} above {step}. To begin anew set {ELSEWHERE}", warning=True)
        )
    return found


def _of_another_rank(settings: Settings, newest: Path) -> list[Problem]:
    """Of an adapter, as far as a file of the checkpoint says its rank: verl's of FSDP, PEFT's where weights are saved
    for Hugging Face. Of others the engine refuses the shapes when it loads them."""
    key = RANK if uses_megatron(settings) else FSDP_RANK
    wanted = settings.integer(key, 0, least=0)
    files = (newest / "actor" / name for name in RANKS)
    with looking_at(FOLDER, str(newest)):
        saved = next((_rank_in(newest, file) for file in files if file.is_file()), None)
    if not wanted or saved in (None, wanted):
        return []
    reason = f"is not the rank {saved} of the adapter in {newest}, from which the run would resume"
    return [Problem(key, wanted, reason, f"Set {key}={saved}. To begin anew set {ELSEWHERE}")]


def _rank_in(newest: Path, file: Path) -> object:
    """The adapter's rank that a checkpoint's file says; None where it says none. ConfigError where it is damaged."""
    try:
        saved = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        found = f"is damaged: {error}"
    else:
        if isinstance(saved, dict):
            return saved.get("r")
        found = "is damaged: it is no JSON object"
    reason = f"{file.relative_to(newest)} of the checkpoint from which the run would resume {found}"
    raise ConfigError(FOLDER, str(newest), reason, RESUME_ANOTHER)


def _without_actor(folder: str, newest: Path) -> Problem:
    """Of a checkpoint from which verl would resume, and whose model is gone: verl fails when it loads it."""
    whole = [step for step in saved_steps(newest.parent) if (step_folder(newest.parent, step) / "actor").is_dir()]
    way_out = f"Set {ELSEWHERE}"
    if whole:
        way_out = f"Set {MODE}=resume_path and {PATH}={step_folder(newest.parent, max(whole))}. Or set {ELSEWHERE}"
    reason = f"its newest checkpoint {newest}, from which the run would resume, has no folder actor"
    return Problem(FOLDER, folder, reason, way_out)


def _tracked(folder: Path) -> int | None:
    """The step from which verl resumes; None where it has nothing to resume from, or nothing that can be read here."""
    try:
        return tracked_step(folder)
    except OSError:
        return None


def _engine_of(actor: Path) -> str | None:
    """Whose checkpoint it is, by its files; None where they do not show it."""
    if any(actor.glob("model_world_size_*_rank_*.pt")):
        return "FSDP"
    return "Megatron" if any((actor / name / "dist_ckpt").is_dir() for name in LOADED) else None


def _checkpoint(path: str) -> None:
    """ConfigError when it is no checkpoint; verl reads the step after the last `global_step_`."""
    folder = path.rstrip("/")
    _, found, step = folder.rpartition(PREFIX)
    if not found or not step.isdigit():
        way_out = f"Set {PATH} to a checkpoint's own folder, .../{PREFIX}<step>"
        raise ConfigError(PATH, path, f"does not end in {PREFIX}<step>", way_out)
    if not os.path.isdir(folder):
        raise ConfigError(PATH, path, "there is no such folder", _way_out())
    if not os.path.isdir(os.path.join(folder, "actor")):
        raise ConfigError(PATH, path, "is no checkpoint: it has no folder actor", _way_out())
    if (weights := weights_not_finite(Path(folder))) is not None:
        raise ConfigError(PATH, path, f"{NOT_FINITE} {weights}", RESUME_ANOTHER)


def _way_out() -> str:
    return f"Set {PATH} to a folder that a run saved, or {MODE}=auto to continue from trainer.default_local_dir"
