"""What a run is, in `run.json` beside its checkpoints: for views of the run, then and later. The run never reads it."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from seamless_verl.runtime.files import write_atomically

logger = logging.getLogger(__name__)
FILE = "run.json"


@dataclass(frozen=True)
class RunDescription:
    """What a run is: `journals` are absolute paths, none without a gateway; `model` is the folder of its tokenizer.

    `began` is in seconds since the epoch, of the last start if it was resumed. A prompt has `samples` samples, and a
    step `updates` local updates (`parameter_sync_step`).
    """

    name: str
    began: float
    layout: str
    model: str | None = None
    journals: tuple[str, ...] = ()
    max_staleness: int | None = None
    samples: int | None = None
    updates: int | None = None

    @classmethod
    def read(cls, folder: Path) -> RunDescription | None:
        """The description in the folder; None if there is none that this release can read."""
        try:
            return msgspec.json.decode((folder / FILE).read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError):
            return None

    def write(self, folder: Path) -> None:
        """Writes it into the folder; a reader never sees half of one. A disk that refuses it brings a warning."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / FILE, json.dumps(asdict(self), indent=2) + "\n")
        except OSError as error:
            logger.warning("%s: not written, so a view knows less of this run: %s", folder / FILE, error)
