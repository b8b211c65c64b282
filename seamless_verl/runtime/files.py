"""Files of which no reader sees half: text that is written at once, JSON lines that are appended, what a run is.

A file of JSON lines has an object a line, with its `step` where a run appends as it goes. Invariants: a line is written
in one write; a last line without its end is none, as where the disk was full, the power went, or it is being written.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

logger = logging.getLogger(__name__)
DESCRIPTION = "run.json"


@contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """Yields a temporary path to write; it replaces `path` when the block ends without an error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that no reader sees half of it."""
    with replaced_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@dataclass(frozen=True)
class JsonLines:
    """A file of JSON lines; it need not exist."""

    path: Path

    def add(self, row: Mapping[str, object]) -> None:
        """Appends a line."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def resume_at(self, step: int) -> None:
        """Drops the lines after `step`, the one whose checkpoint was loaded; all of them for 0, a run from nothing."""
        lines = self.lines()
        kept = [line for line in lines if step > 0 and any(row["step"] <= step for row in whole_rows([line]))]
        if kept != lines:
            write_atomically(self.path, "".join(kept))

    def rows(self) -> list[dict[str, Any]]:
        """The objects, in the order of the file."""
        return list(whole_rows(self.lines()))

    def lines(self) -> list[str]:
        """The lines with their ends, as they are."""
        return self.path.read_text(encoding="utf-8").splitlines(keepends=True) if self.path.is_file() else []


def whole_rows(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The objects of these lines, without one that lacks its end."""
    return (json.loads(line) for line in lines if line.endswith("\n"))


@dataclass(frozen=True)
class RunDescription:
    """What a run is, in `run.json` beside its checkpoints: for views of the run. The run itself never reads it.

    `journals` are absolute paths, none without a gateway; `model` is the folder of its tokenizer.

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
            return msgspec.json.decode((folder / DESCRIPTION).read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError):
            return None

    def write(self, folder: Path) -> None:
        """Writes it into the folder; a reader never sees half of one. A disk that refuses it brings a warning."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / DESCRIPTION, json.dumps(asdict(self), indent=2) + "\n")
        except OSError as error:
            logger.warning("%s: not written, so a view knows less of this run: %s", folder / DESCRIPTION, error)
