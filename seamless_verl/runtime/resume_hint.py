"""What to do after a run that ended early: from which step the same command goes on.

The run writes how it resumes beside its run file, where its supervisor finds it when every process of the run is gone.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from seamless_verl.runtime.checkpoint_marker import step_folder, tracker_state

FILE = "resume.json"  # beside the run file
AUTO, FROM_PATH = "auto", "resume_path"


@dataclass(frozen=True)
class ResumeSettings:
    """`trainer.default_local_dir`, `resume_mode`, `resume_from_path` and `save_freq` of a run."""

    checkpoints: str
    mode: str
    path: str | None
    save_freq: int

    def keep(self, run_file: Path) -> None:
        run_file.with_name(FILE).write_text(json.dumps(asdict(self)))

    @classmethod
    def of_run(cls, run_file: Path) -> ResumeSettings | None:
        """What the run kept; None when it ended before."""
        file = run_file.with_name(FILE)
        return cls(**json.loads(file.read_text())) if file.is_file() else None

    def hint(self) -> str:
        """One line for the user, by the last complete checkpoint that is there now."""
        if self.mode == FROM_PATH:
            return f"The same command begins again from trainer.resume_from_path={self.path}"
        folder = Path(self.checkpoints)
        state = tracker_state(folder)
        step = int(state[0]) if state is not None and str(state[0]).isdigit() else None
        if step is None:
            more = "" if self.save_freq > 0 else "; with trainer.save_freq=N it saves every N steps, and resumes"
            return f"There is no checkpoint in {folder}: the same command begins anew{more}"
        if self.mode != AUTO:
            return (
                f"trainer.resume_mode={self.mode}: the same command begins anew. With trainer.resume_mode=auto it "
                f"resumes from step {step}, in {step_folder(folder, step)}"
            )
        return f"The same command resumes from step {step}, whose checkpoint is {step_folder(folder, step)}"
