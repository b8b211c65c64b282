"""Run the agent in this folder, and collect the Python sources it leaves, without the tests.

    collect.py SECONDS LOG COMMAND ...

Written to reward.json, without a reward: `files` by name, `exit_code` (null after a timeout), and `replies`, the
model's replies from the agent's LOG. The files are judged in another folder, when no process of the agent runs any
more.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

FILE_BYTES, ALL_BYTES = 64 << 10, 96 << 10
"""Of one source and of all: what exceeds them is left out. JSON may need six times as much, and 1 MiB is read."""

MAX_REPLIES, REPLY_CHARS = 20, 1000
REWARD = "reward.json"


def main(arguments: list[str]) -> int:
    seconds, log, *command = arguments
    try:
        code = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=float(seconds)).returncode
    except subprocess.TimeoutExpired:
        code = None
    result = {"reward": None, "exit_code": code, "files": sources(Path()), "replies": replies(Path(log))}
    temporary = Path(f".{REWARD}.{os.getpid()}")
    temporary.write_text(json.dumps(result))
    os.replace(temporary, REWARD)  # a link of this name by the agent is replaced, not followed
    return 0


def sources(folder: Path) -> dict[str, str]:
    """The regular files `*.py` below the folder, without links, tests and files that are no text."""
    found, remaining = {}, ALL_BYTES
    for path in sorted(folder.rglob("*.py")):
        if path.name.startswith("test_") or path.is_symlink() or not path.is_file():
            continue
        size = path.stat().st_size
        if size > min(FILE_BYTES, remaining):
            continue
        try:
            found[path.as_posix()] = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, PermissionError):
            continue
        remaining -= size
    return found


def replies(log: Path) -> list[str]:
    """The model's replies, including those that the agent could not parse; none without a log."""
    if not log.is_file():
        return []
    messages: list[dict[str, Any]] = json.loads(log.read_text(encoding="utf-8"))["messages"]
    texts = [
        message.get("content") if message.get("role") == "assistant" else message.get("extra", {}).get("model_response")
        for message in messages
    ]
    return [text[:REPLY_CHARS] for text in texts if text is not None][-MAX_REPLIES:]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
