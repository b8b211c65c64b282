"""The file beside the journal by which programs of the same user find a run: address, keys and process.

It is removed at each end of a run that can be handled. One that a killed run left is recognized: the run held the
journal's lock, which the kernel releases however a process ends.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from socket import gethostname

import msgspec

from seamless_verl.errors import ConfigError
from seamless_verl.runtime.locks import is_locked, lock_file

SUFFIX = ".admin.json"
RUNNER_KEY_SUFFIX = ".runner-key"


class AdminFile(msgspec.Struct, frozen=True):
    """`key` opens the admin API, `runner_key` only what runners need; `host` and `pid` are the gateway's."""

    url: str
    key: str
    runner_key: str = ""
    host: str = ""
    pid: int = 0

    @staticmethod
    def beside(journal: str | Path) -> Path:
        return Path(f"{journal}{SUFFIX}")

    @classmethod
    def read(cls, path: str | Path, *, key: str = "file") -> AdminFile:
        """The content of the file; raises ConfigError if it is missing, or was left by a run that has ended.

        `key`: what names the file, for the message.
        """
        path = Path(path)
        try:
            found = msgspec.json.decode(path.read_bytes(), type=cls)
        except OSError as error:
            way_out = "Name the file that the run's log names; a run without seamless.gateway.enabled has none"
            raise ConfigError(key, str(path), f"cannot be read: {error.strerror}", way_out) from error
        except msgspec.DecodeError as error:
            raise ConfigError(key, str(path), f"is no file of a run: {error}", "Name the run's own file") from error
        if found.is_stale(path):
            reason = f"the run that wrote it has ended (process {found.pid} on {found.host})"
            raise ConfigError(key, str(path), reason, "Start the run again; it replaces the file")
        return found

    def is_stale(self, path: Path) -> bool:
        """Whether the run that wrote it has ended, as far as that shows.

        It does not on another host, nor of a copy, which has no journal with its lock beside it.
        """
        journal = journal_beside(path)
        return lock_file(journal).exists() and self._has_ended(journal)

    def _has_ended(self, journal: Path) -> bool:
        if self.host != gethostname():
            return False
        try:
            return not is_locked(journal)
        except OSError:  # a file system without locks
            return not Path(f"/proc/{self.pid}").exists()

    def write(self, path: Path) -> None:
        """Writes the file, readable by its owner only; a reader never sees half of one."""
        write_privately(path, msgspec.json.encode(self))


def journal_beside(path: Path) -> Path:
    """The journal of the run that wrote the admin file `path`, which may be a link to it."""
    return Path(str(path.resolve()).removesuffix(SUFFIX))


def kept_runner_key(journal: str | Path, new: str) -> str:
    """The key of runners of the first start with this journal, `new` if this is the first.

    It stays in a file beside the journal, readable by its owner only: runners outlive a run that is stopped as a whole.
    """
    path = Path(f"{journal}{RUNNER_KEY_SUFFIX}")
    if new and not path.exists():
        write_privately(path, new.encode())
    return path.read_text() if new else new


def write_privately(path: Path, content: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # its mode is 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def remove_stale(path: Path) -> bool:
    """Removes the file, which a run wrote here, if that run was on this host and has ended; whether it did."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=AdminFile)
    except (OSError, msgspec.DecodeError):
        return False
    if found._has_ended(journal_beside(path)):
        path.unlink(missing_ok=True)
        return True
    return False
