"""Run the agent in this folder, and hand in what it leaves: the Python sources, without the tests.

    collect.py SECONDS LOG COMMAND ...

Written to reward.json, without a reward: `files` by name, `exit_code` (null when the time was over), and
`said`, the model's replies as the agent's LOG has them. What is handed in is judged elsewhere, when no process
of the agent runs any more.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

FILE_BYTES, ALL_BYTES = 64 << 10, 96 << 10
"""Of one source and of all: what does not fit is left out. JSON may need six times as much, and 1 MiB is read."""

REPLIES, REPLY_CHARS = 20, 1000
REWARD = "reward.json"


def main(arguments: list[str]) -> int:
    seconds, log, *command = arguments
    try:
        code = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=float(seconds)).returncode
    except subprocess.TimeoutExpired:
        code = None
    given = {"reward": None, "exit_code": code, "files": sources(Path()), "said": said(Path(log))}
    temporary = Path(f".{REWARD}.{os.getpid()}")
    temporary.write_text(json.dumps(given))
    os.replace(temporary, REWARD)  # also where the agent made a link of this name
    return 0


def sources(folder: Path) -> dict[str, str]:
    """The regular files `*.py` of the folder and those below, but links, tests and what is no text."""
    found, left = {}, ALL_BYTES
    for path in sorted(folder.rglob("*.py")):
        if path.name.startswith("test_") or path.is_symlink() or not path.is_file():
            continue
        size = path.stat().st_size
        if size > min(FILE_BYTES, left):
            continue
        try:
            found[path.as_posix()] = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, PermissionError):
            continue
        left -= size
    return found


def said(log: Path) -> list[str]:
    """The model's replies, those too that the agent could not read; none when there is no log."""
    if not log.is_file():
        return []
    messages: list[dict[str, Any]] = json.loads(log.read_text(encoding="utf-8"))["messages"]
    replies = [
        message.get("content") if message.get("role") == "assistant" else message.get("extra", {}).get("model_response")
        for message in messages
    ]
    return [reply[:REPLY_CHARS] for reply in replies if reply is not None][-REPLIES:]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
