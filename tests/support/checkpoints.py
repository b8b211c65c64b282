"""What verl does to a folder of checkpoints; processes that are to be killed import it, and so it imports little."""

from __future__ import annotations

import os
from pathlib import Path

from seamless_verl.runtime.checkpoint_marker import TRACKER, tracker_state


def save(folder: Path, step: int, *, finish: bool = True) -> None:
    """As verl does, as far as it goes; at the end the tracker is emptied, then written."""
    (folder / f"global_step_{step}" / "actor").mkdir(parents=True, exist_ok=True)
    if finish:
        (folder / f"global_step_{step}" / "actor" / "weights").touch()
        (folder / f"global_step_{step}" / "data.pt").touch()
        write_tracker(folder, str(step))


def write_tracker(folder: Path, text: str) -> None:
    """With a time of its own, as in a real run: tests write twice within one tick of the clock."""
    state = tracker_state(folder)
    (folder / TRACKER).write_text(text)
    if state is not None:
        os.utime(folder / TRACKER, ns=(int(state[1]) + 10**9,) * 2)
