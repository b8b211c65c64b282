"""What this process, and those that it started, have written to its standard streams since: the error behind an end.

An engine's processes write why they end to the streams that they inherit; whoever waits for them learns only that they
ended. In an actor of Ray the streams are two files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path

STREAMS = (2, 1)  # where an error is looked for first
ERROR = re.compile(
    r"^(?!.*\b(?:DEBUG|INFO|WARNING)\b)\s*(?:.*?[\]\)]\s+|\S+(?: \w+)?: )?"
    r"((?:[A-Za-z_][\w.]*(?:Error|Exception)|error): \S.*)$"
)
"""A line that names one: of a traceback, also behind a logger's prefix, or of a command line that is not accepted."""


class OwnLog:
    """The files behind the standard streams, from their present ends on."""

    def __init__(self) -> None:
        links = (Path(f"/proc/self/fd/{stream}").resolve() for stream in STREAMS)
        self.begun = {file: file.stat().st_size for file in links if file.is_file()}

    def last_error(self, besides: Collection[str] = ()) -> str | None:
        """The last line that names an error, from its name on; not one that has any of these texts."""
        for file, begun in self.begun.items():
            with file.open("rb") as written:
                written.seek(begun)
                found = errors_in(written.read().decode(errors="replace"))
            if chosen := [line for line in found if not any(text in line for text in besides)]:
                return chosen[-1]
        return None


def errors_in(text: str) -> list[str]:
    """The lines that name an error, each from its name on."""
    return [found[1].strip() for line in text.splitlines() if (found := ERROR.match(line))]


def stream_names() -> str:
    """The names of the files behind the standard streams, for who looks for them."""
    return ", ".join(sorted({os.path.basename(os.readlink(f"/proc/self/fd/{stream}")) for stream in STREAMS}))
