"""The checkpoints of a run: what they have of this package's parts, and which of them verl's rotation removes, when.

`trainer.max_actor_ckpt_to_keep` counts what a process has saved, so that each resumed start would leave as many full
checkpoints behind for ever. What earlier starts saved is therefore adopted.

With a bound of 1 verl removes the previous actor as soon as the new one is written, before the rest of the checkpoint
and the tracker are: a run that is killed in between has none to resume from. So a save keeps two at least, and those
beyond the bound are removed when the tracker names the new one.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from omegaconf import DictConfig
from verl.single_controller.base.decorator import Dispatch, register

from seamless_verl.config.model import MODEL
from seamless_verl.errors import ConfigError, NotFiniteError
from seamless_verl.resources.ahead import AheadLevel
from seamless_verl.resources.tail_batching import TailBatching
from seamless_verl.runtime.checkpoint_cleanup import marked_save, remove_emptied
from seamless_verl.runtime.checkpoint_marker import (
    RESUME_ANOTHER,
    record_finite,
    saved_steps,
    step_folder,
    tracked_step,
)
from seamless_verl.runtime.files import write_atomically
from seamless_verl.trainer.finite_updates import has_finite_weights
from seamless_verl.trainer.lending import DeviceLending

logger = logging.getLogger(__name__)
MANAGERS = ("checkpoint_mananager", "checkpoint_manager")  # verl spells Megatron's so
PROMPTS, SCHEDULING, SAMPLER = "prompts.json", "scheduling.json", "sampler.json"  # in a checkpoint's folder


class Saved(Protocol):
    """A part whose state is in each checkpoint."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class SchedulingState:
    """What a run has found out about its devices, and which prompts it deferred."""

    def __init__(self, lending: DeviceLending, ahead: AheadLevel | None, tail: TailBatching) -> None:
        self.lending, self.ahead, self.tail = lending, ahead, tail

    def state_dict(self) -> dict[str, Any]:
        ahead = None if self.ahead is None else self.ahead.state_dict()
        return {"lending": self.lending.state_dict(), "ahead": ahead, "tail": self.tail.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begins anew with what is of another lending policy."""
        if self.ahead is not None and state["ahead"] is not None:
            self.ahead.load_state_dict(state["ahead"])
        self.tail.load_state_dict(state["tail"])
        try:
            self.lending.load_state_dict(state["lending"])
        except ValueError as error:
            logger.warning("seamless.lending was changed, so that what %s knows is not used: %s", SCHEDULING, error)


def save_state(checkpoint: Path, parts: Mapping[str, Saved]) -> None:
    """Writes each part's state to its file; a run that is killed here resumes without one, not with half of it."""
    for file, part in parts.items():
        write_atomically(checkpoint / file, json.dumps(part.state_dict()))


def load_state(checkpoint: Path, parts: Mapping[str, Saved]) -> None:
    """Continues with what the checkpoint has; a part begins anew where it has none of it, as one of verl's modes."""
    for file, part in parts.items():
        if (checkpoint / file).is_file():
            part.load_state_dict(json.loads((checkpoint / file).read_text(encoding="utf-8")))


class RunCheckpoints:
    """The checkpoints in a run's folder: whole ones, bounded in number, of weights that are finite.

    `groups` gives the worker groups that save, by their role, which is their folder's name. Owned state: the steps of
    which this run saved or adopted a checkpoint, and did not remove it.
    """

    def __init__(self, config: DictConfig, groups: Callable[[], Mapping[str, Any]]) -> None:
        self.config, self.groups = config, groups
        self.folder = Path(os.path.abspath(config.trainer.default_local_dir))
        self.saved: list[int] = []

    def refuse_not_finite(self, what: str, way_out: str) -> None:
        """Raises NotFiniteError if a weight of actor or critic is not a finite number."""
        for role, group in self.groups().items():
            group.refuse_not_finite(f"{what} of the {role}", way_out)

    def loaded(self, step: int) -> None:
        """verl has loaded the checkpoint of this step: what earlier starts saved is rotated like what this one saves.

        One that was killed while it rotated may have left a folder without its actor.
        """
        self.refuse_not_finite(f"Checkpoint {checkpoint_of(self.config, step)}", RESUME_ANOTHER)
        if loaded_from(self.config) != self.folder:
            return
        self.saved = earlier_steps(self.folder, step)
        if kept_checkpoints(self.config)["actor"] is not None and step in self.saved:
            remove_emptied(self.folder, all_steps(self.folder, step))
        for role, group in self.groups().items():
            group.adopt_checkpoints([str(step_folder(self.folder, saved) / role) for saved in self.saved])

    @contextmanager
    def saving(self, step: int, parts: Mapping[str, Saved]) -> Iterator[None]:
        """In the block verl saves the rest of the checkpoint, whose weights the caller has found finite."""
        with marked_save(self.config.trainer.default_local_dir, step):
            checkpoint = checkpoint_of(self.config, step)
            checkpoint.mkdir(parents=True, exist_ok=True)
            record_finite(checkpoint)
            save_state(checkpoint, parts)
            yield
        kept = kept_checkpoints(self.config)
        for role, group in self.groups().items():
            if kept[role] is not None:
                group.prune_checkpoints(kept[role])
        if (step_folder(self.folder, step) / "actor").is_dir():  # else on another machine, or not yet
            self.saved = remove_emptied(self.folder, [*self.saved, step])


def checkpoint_of(config: DictConfig, step: int) -> Path:
    """The folder of the checkpoint that this run loads or saves at `step`."""
    given = str(config.trainer.resume_from_path).rstrip("/")
    if config.trainer.resume_mode == "resume_path" and given.endswith(f"_{step}"):
        return Path(given)
    return Path(config.trainer.default_local_dir, f"global_step_{step}")


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


def kept_checkpoints(config: Any) -> dict[str, int | None]:
    """How many checkpoints of the actor, and of the critic, the run keeps; None for all of them."""
    if config.trainer.get("remove_previous_ckpt_in_save", False):  # verl's older name for 1 of each
        return {"actor": 1, "critic": 1}
    kept = {role: config.trainer.get(f"max_{role}_ckpt_to_keep", None) for role in ("actor", "critic")}
    return {role: number if isinstance(number, int) and number > 0 else None for role, number in kept.items()}


def kept_while_saving(engine: Any, keep: int | None) -> int | None:
    """The bound for the save itself, which leaves the checkpoint that the tracker names."""
    if manager_of(engine) is None:  # nothing would be pruned after it
        return keep
    return max(2, keep) if isinstance(keep, int) and keep > 0 else keep


def adopt(engine: Any, paths: list[str]) -> None:
    """The engine's rotation counts these checkpoints as its own, oldest first."""
    if (manager := manager_of(engine)) is not None:
        manager.previous_saved_paths = [*paths, *manager.previous_saved_paths]


def prune(engine: Any, keep: int) -> None:
    """Removes what the engine's rotation counts, but for the newest `keep`, of which the tracker names one."""
    if (manager := manager_of(engine)) is not None:
        manager.remove_previous_save_local_path(manager.previous_saved_paths[:-keep])
        manager.previous_saved_paths = manager.previous_saved_paths[-keep:]


def manager_of(engine: Any) -> Any:
    """What saves and rotates the engine's checkpoints; None for engines that do it without verl's manager."""
    return next((getattr(engine, name) for name in MANAGERS if hasattr(engine, name)), None)


ADAPTERS = (Path("model", "huggingface", "adapter"), Path("lora_adapter"))  # of Megatron's and of FSDP's checkpoints


def refuse_other_adapter(model: Any, checkpoint: str | None) -> None:
    """Raises ConfigError if the checkpoint has an adapter of another rank than verl's `model` config.

    Megatron would name a tensor with its two shapes, a minute later.
    """
    key = f"{MODEL}.lora.rank" if model.lora.get("rank", 0) else f"{MODEL}.lora_rank"
    rank = model.lora.get("rank", 0) or model.lora_rank
    for file in (Path(checkpoint, folder, "adapter_config.json") for folder in ADAPTERS if checkpoint and rank):
        saved = json.loads(file.read_text(encoding="utf-8"))["r"] if file.is_file() else rank
        if saved != rank:
            reason = f"is not the rank {saved} of the adapter that the checkpoint has in {file.parent}"
            raise ConfigError(key, rank, reason, f"Set it to {saved}. {RESUME_ANOTHER}")


class RotatesCheckpoints:
    """What the trainer calls of a worker for its checkpoints; stands before a class of verl's that saves them."""

    def saved_engine(self) -> Any:
        """The engine whose checkpoints are rotated."""
        raise NotImplementedError

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def refuse_not_finite(self, what: str, way_out: str) -> None:
        """Raises NotFiniteError, on every rank, if a weight of `what` is not a finite number."""
        if not has_finite_weights(self.saved_engine()):
            raise NotFiniteError(f"{what} has weights that are not finite numbers", way_out)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def adopt_checkpoints(self, paths: list[str]) -> None:
        """Checkpoints of earlier starts, oldest first, count for `max_actor_ckpt_to_keep`, or the critic's."""
        adopt(self.saved_engine(), paths)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, global_step: int = 0, max_ckpt_to_keep: int | None = None
    ) -> None:
        keep = kept_while_saving(self.saved_engine(), max_ckpt_to_keep)
        super().save_checkpoint(local_path, hdfs_path, global_step, keep)  # type: ignore[misc]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        refuse_other_adapter(self.saved_engine().model_config, local_path)
        super().load_checkpoint(local_path, hdfs_path, del_local_after_load)  # type: ignore[misc]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def prune_checkpoints(self, keep: int) -> None:
        """The tracker names the last checkpoint: with it, the newest `keep` stay."""
        prune(self.saved_engine(), keep)
