"""What a run has found out about its devices and prompts, and which it deferred, in a checkpoint.

A resumed run decides by what the first one measured, and begins the prompts again that the first one left over.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from omegaconf import DictConfig

from seamless_verl.algorithms.samplers import PromptSampling
from seamless_verl.resources.ahead import AheadLevel
from seamless_verl.resources.tail_batching import TailBatching
from seamless_verl.runtime.files import write_atomically
from seamless_verl.trainer.lending import DeviceLending

logger = logging.getLogger(__name__)
STATE, SAMPLER = "scheduling.json", "sampler.json"  # in a checkpoint's folder
RECORDING = "lending.jsonl"  # beside the checkpoints, of all starts of a run


def checkpoint_of(config: DictConfig, step: int) -> Path:
    """The folder of the checkpoint that this run loads or saves at `step`."""
    given = str(config.trainer.resume_from_path).rstrip("/")
    if config.trainer.resume_mode == "resume_path" and given.endswith(f"_{step}"):
        return Path(given)
    return Path(config.trainer.default_local_dir, f"global_step_{step}")


def save_scheduling(checkpoint: Path, lending: DeviceLending, ahead: AheadLevel | None, tail: TailBatching) -> None:
    state = {"lending": lending.state_dict(), "ahead": None if ahead is None else ahead.state_dict()}
    state |= {"tail": tail.state_dict()}
    write_atomically(checkpoint / STATE, json.dumps(state))  # a run killed here resumes without it, not with half of it


def load_scheduling(checkpoint: Path, lending: DeviceLending, ahead: AheadLevel | None, tail: TailBatching) -> None:
    """Continues with the checkpoint's state; begins anew with what it does not have, or has of another policy."""
    file = checkpoint / STATE
    if not file.is_file():
        return
    state = json.loads(file.read_text(encoding="utf-8"))
    if ahead is not None and state["ahead"] is not None:
        ahead.load_state_dict(state["ahead"])
    if "tail" in state:
        tail.load_state_dict(state["tail"])
    try:
        lending.load_state_dict(state["lending"])
    except ValueError as error:
        logger.warning("seamless.lending was changed, so that what %s knows is not used: %s", file, error)


def save_sampling(checkpoint: Path, sampling: PromptSampling) -> None:
    """What the sampler knows of prompts, and the groups that it reopened; their rows are in TransferQueue's part."""
    write_atomically(checkpoint / SAMPLER, json.dumps(sampling.state_dict()))


def load_sampling(checkpoint: Path, sampling: PromptSampling) -> None:
    """Continues with the checkpoint's histories and reopened groups; a checkpoint without a sampler has none."""
    file = checkpoint / SAMPLER
    if file.is_file():
        sampling.load_state_dict(json.loads(file.read_text(encoding="utf-8")))
