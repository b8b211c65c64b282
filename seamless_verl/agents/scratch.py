"""The folder that one command works in: made for it, and deleted after it, or moved where it is to be kept.

work/   its working folder: a copy of the template, with task.json; it may write reward.json here
home/   its HOME
tmp/    its TMPDIR
prompt.txt   the text of the last user message, when there is one
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seamless_verl.agents.outcome import reward_of

TASK, REWARD, PROMPT = "task.json", "reward.json", "prompt.txt"
REWARD_BYTES = 1 << 20
PREFIX = "seamless-agent-"
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scratch:
    root: Path

    @classmethod
    def make(cls) -> Scratch:
        """An empty folder that only its owner may enter, under this process's own TMPDIR."""
        return cls(Path(tempfile.mkdtemp(prefix=PREFIX)))

    @property
    def work(self) -> Path:
        return self.root / "work"

    @property
    def prompt_file(self) -> Path:
        return self.root / PROMPT

    def fill(self, template: Path | None, task: str, question: str | None = None) -> None:
        """Copy the template, links as links, and write the task. Raises OSError."""
        if template is None:
            self.work.mkdir()
        else:
            shutil.copytree(template, self.work, symlinks=True)
            self.work.chmod(0o700)  # the copy has the template's mode
        for name in (TASK, REWARD):  # a template's reward is not this run's, and a link may lead outside
            (self.work / name).unlink(missing_ok=True)
        (self.work / TASK).write_text(task)
        if question is not None:
            self.prompt_file.write_text(question)
        for name in ("home", "tmp"):
            (self.root / name).mkdir()

    def environment(self) -> dict[str, str]:
        return {"HOME": str(self.root / "home"), "TMPDIR": str(self.root / "tmp"), "PWD": str(self.work)}

    def reward(self) -> tuple[float | None, dict[str, Any]]:
        """The reward in reward.json; raises ValueError, with the reason, when it is malformed."""
        try:  # the command made the file: refuse a link out of the folder, a pipe that blocks, a file without end
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
        return parse_reward(text)

    def keep_work(self, folder: Path, name: str) -> str:
        """Moves the working folder into `folder`, under `name` and a random end; says where it is, or why it is not."""
        kept = folder.absolute() / f"{name.replace(os.sep, '_')}-{self.root.name.removeprefix(PREFIX)}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.move(self.work, kept)
        except OSError as error:  # it ends no session that a folder was to be looked at
            return f"its working folder could not be kept as {kept}: {error}"
        return f"its working folder is kept: {kept}"

    def remove(self) -> None:
        """Delete the folder, also parts that the command made read-only.

        What cannot be deleted, such as files of another user that a container left, is logged in one line.
        """
        try:
            shutil.rmtree(self.root)
        except PermissionError:
            make_writable(self.root)
            failures: list[BaseException] = []
            shutil.rmtree(self.root, onerror=lambda *failure: failures.append(failure[2][1]))
            if failures:
                log_undeleted(self.root, failures[0])
        except OSError as error:
            log_undeleted(self.root, error)


def parse_reward(text: bytes) -> tuple[float | None, dict[str, Any]]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{REWARD} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f'{REWARD} holds {value!r:.80}; write {{"reward": number, ...}}')
    try:
        return reward_of(value)
    except ValueError as error:
        raise ValueError(f"{REWARD}: {error}") from error


def make_writable(root: Path) -> None:
    """Gives this user all rights to the folders in `root` that are its own."""
    for folder, names, _ in os.walk(root):  # top down, so that each folder can be entered
        for name in names:
            path = Path(folder, name)
            with suppress(OSError):  # a folder of another user's, or in one
                if not path.is_symlink():
                    path.chmod(0o700)


def log_undeleted(root: Path, error: BaseException) -> None:
    logger.warning("The working folder %s could not be deleted completely: %s", root, error)
