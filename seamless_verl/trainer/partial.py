"""No half-written checkpoint is left behind by a run that was stopped while saving.

verl writes `global_step_<n>/` and then, last, the number n into a tracker file. A folder that
appeared during a run and is newer than the tracker says was not finished.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

TRACKER = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True)
class CheckpointsBefore:
    """What a checkpoint folder held when the run started."""

    folder: Path
    steps: frozenset[int]

    @classmethod
    def of(cls, folder: str) -> CheckpointsBefore:
        return cls(Path(folder), frozenset(saved_steps(Path(folder))))

    def discard_partial(self) -> list[Path]:
        """Remove what this run began to save and did not finish; returns the folders removed."""
        finished = tracked_step(self.folder)
        partial = [s for s in saved_steps(self.folder) - self.steps if finished is None or s > finished]
        folders = [self.folder / f"global_step_{step}" for step in sorted(partial)]
        for folder in folders:
            shutil.rmtree(folder)
        return folders


def saved_steps(folder: Path) -> set[int]:
    numbers = (path.name.removeprefix("global_step_") for path in folder.glob("global_step_*"))
    return {int(number) for number in numbers if number.isdigit()}


def tracked_step(folder: Path) -> int | None:
    """The step of the last finished checkpoint.

    verl truncates the tracker before it writes the number, at which point the newest folder is
    whole: an empty tracker is mended to say so.
    """
    tracker = folder / TRACKER
    if not tracker.exists():
        return None
    if not tracker.read_text().strip():
        tracker.write_text(str(max(saved_steps(folder))))
    return int(tracker.read_text())
