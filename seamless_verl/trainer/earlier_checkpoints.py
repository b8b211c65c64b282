"""Which checkpoints verl's rotation removes, and when.

`trainer.max_actor_ckpt_to_keep` counts what a process has saved. So each resumed start would leave as many full
checkpoints behind for ever: a run that is resumed often fills its disk. What earlier starts saved is therefore adopted.

With a bound of 1 verl removes the previous actor as soon as the new one is written, before the rest of the checkpoint
and the tracker are. A run that is killed in between has none to resume from. So a save keeps two at least, and those
beyond the bound are removed when the tracker names the new one.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from seamless_verl.runtime.checkpoint_marker import saved_steps, step_folder, tracked_step

MANAGERS = ("checkpoint_mananager", "checkpoint_manager")  # verl spells Megatron's so


def all_steps(folder: Path, loaded: int) -> list[int]:
    """The steps that have a checkpoint in the folder, whole or not, up to the one that was loaded, ascending."""
    return sorted(step for step in saved_steps(folder) if step <= loaded)


def earlier_steps(folder: Path, loaded: int) -> list[int]:
    """Those of `all_steps` that have an actor's checkpoint."""
    return [step for step in all_steps(folder, loaded) if (step_folder(folder, step) / "actor").is_dir()]


def loaded_from(config: Any) -> Path:
    """The folder of the checkpoints from which a resumed run goes on; of another run, with a path of its own."""
    if config.trainer.resume_mode == "resume_path":
        return Path(os.path.abspath(config.trainer.resume_from_path)).parent
    return Path(os.path.abspath(config.trainer.default_local_dir))


def resumed_checkpoint(config: Any) -> Path | None:
    """The checkpoint that verl is going to load; None for a run that begins from nothing."""
    if config.trainer.resume_mode == "resume_path":
        return Path(os.path.abspath(config.trainer.resume_from_path))
    folder = loaded_from(config)
    step = tracked_step(folder) if config.trainer.resume_mode == "auto" else None
    return None if step is None else step_folder(folder, step)


def kept_checkpoints(config: Any) -> tuple[int | None, int | None]:
    """How many checkpoints of the actor, and of the critic, the run keeps; None for all of them."""
    if config.trainer.get("remove_previous_ckpt_in_save", False):  # verl's older name for 1 of each
        return 1, 1
    kept = [config.trainer.get(f"max_{role}_ckpt_to_keep", None) for role in ("actor", "critic")]
    actor, critic = (number if isinstance(number, int) and number > 0 else None for number in kept)
    return actor, critic


def kept_while_saving(engine: Any, keep: int | None) -> int | None:
    """The bound for the save itself, which leaves the checkpoint that the tracker names."""
    if manager_of(engine) is None:  # nothing would be pruned after it
        return keep
    return max(2, keep) if isinstance(keep, int) and keep > 0 else keep


def adopt(engine: Any, paths: list[str]) -> None:
    """The engine's rotation counts these checkpoints as its own, oldest first."""
    if (manager := manager_of(engine)) is None:
        return
    manager.previous_saved_paths = [*paths, *manager.previous_saved_paths]


def prune(engine: Any, keep: int) -> None:
    """Removes what the engine's rotation counts, but for the newest `keep`, of which the tracker names one."""
    if (manager := manager_of(engine)) is None:
        return
    manager.remove_previous_save_local_path(manager.previous_saved_paths[:-keep])
    manager.previous_saved_paths = manager.previous_saved_paths[-keep:]


def manager_of(engine: Any) -> Any:
    """What saves and rotates the engine's checkpoints; None for engines that do it without verl's manager."""
    return next((getattr(engine, name) for name in MANAGERS if hasattr(engine, name)), None)
