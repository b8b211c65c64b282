"""The folder one command works in: made for it, and gone after it.

work/   where it starts: a copy of the template, with task.json; it may leave reward.json here
home/   its HOME
tmp/    its TMPDIR
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seamless_verl.agents.outcome import reward_of

TASK, REWARD = "task.json", "reward.json"
REWARD_BYTES = 1 << 20
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scratch:
    root: Path

    @classmethod
    def make(cls) -> Scratch:
        """An empty folder only its owner may enter, under this process's own TMPDIR."""
        return cls(Path(tempfile.mkdtemp(prefix="seamless-agent-")))

    @property
    def work(self) -> Path:
        return self.root / "work"

    def fill(self, template: Path | None, task: str) -> None:
        """Copy the template, links as links, and write the task. Raises OSError."""
        if template is None:
            self.work.mkdir()
        else:
            shutil.copytree(template, self.work, symlinks=True)
            self.work.chmod(0o700)  # the copy has the template's mode
        for name in (TASK, REWARD):  # a reward in the template is not this run's, a link may lead outside
            (self.work / name).unlink(missing_ok=True)
        (self.work / TASK).write_text(task)
        for name in ("home", "tmp"):
            (self.root / name).mkdir()

    def environment(self) -> dict[str, str]:
        return {"HOME": str(self.root / "home"), "TMPDIR": str(self.root / "tmp"), "PWD": str(self.work)}

    def reward(self) -> tuple[float | None, dict[str, Any]]:
        """What the command left in reward.json; raises ValueError, with the reason, when it is malformed."""
        try:  # the command made it: no link out of the folder, no pipe that blocks, nothing without end
            handle = os.open(self.work / REWARD, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None, {}
        except OSError as error:
            raise ValueError(f"{REWARD} cannot be read: {error.strerror}") from error
        try:  # checked before it becomes a file object: a folder cannot
            facts = os.fstat(handle)
            if not stat.S_ISREG(facts.st_mode) or facts.st_size > REWARD_BYTES:
                raise ValueError(f"{REWARD} is no file of at most {REWARD_BYTES} bytes")
            text = os.read(handle, REWARD_BYTES)
        finally:
            os.close(handle)
        return parsed(text)

    def remove(self) -> None:
        """Delete it all, also folders the command made read-only; what cannot be deleted is logged."""
        try:
            shutil.rmtree(self.root)
        except PermissionError:
            open_folders(self.root)
            shutil.rmtree(self.root, onerror=lambda *failure: complain(self.root, failure[2][1]))
        except OSError as error:
            complain(self.root, error)


def parsed(text: bytes) -> tuple[float | None, dict[str, Any]]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{REWARD} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f'{REWARD} holds {value!r:.80}; write {{"reward": number, ...}}')
    try:
        return reward_of(value)
    except ValueError as error:
        raise ValueError(f"{REWARD}: {error}") from error


def open_folders(root: Path) -> None:
    for folder, names, _ in os.walk(root):  # top down, so that each is open before it is entered
        for name in names:
            path = Path(folder, name)
            if not path.is_symlink():
                path.chmod(0o700)


def complain(root: Path, error: BaseException) -> None:
    logger.warning("The working folder %s is not all deleted: %s", root, error)
