"""What a command prints and writes: text for a terminal, whole files, and errors for packages that an option needs."""

from __future__ import annotations

import importlib
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from seamless_verl.errors import ConfigError
from seamless_verl.runtime.files import write_atomically

NEWLINE_AND_TAB = "\n\t"
AGE_UNITS = (("d", 86400), ("h", 3600), ("m", 60))
GAP = "  "  # between two columns


@contextmanager
def writing(key: str, path: Path) -> Iterator[None]:
    """In the block, an OSError is a ConfigError of the option `key`, which names the file `path`.

    ConfigError also where a device, a pipe or a link is there: a file that is renamed to it would replace it.
    """
    with suppress(OSError):  # nothing is there; if it may not be looked at, it cannot be written
        mode = path.lstat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise ConfigError(key, str(path), "it is a device or a link, which would be replaced", "Give a file")
    try:
        yield
    except OSError as error:
        way_out = "Give a place that can be written, or free the disk"
        raise ConfigError(key, str(path), str(error.strerror or error), way_out) from error


def write_file(key: str, path: Path, text: str) -> None:
    """Raises ConfigError if the place is no file's, or it cannot be written; nothing is left beside it then."""
    with writing(key, path):
        if path.is_dir():
            raise ConfigError(key, str(path), "it is a folder", "Give a file")
        write_atomically(path, text)


def write(text: str) -> None:
    """Writes a line to stdout."""
    sys.stdout.write(text + "\n")


def escape(text: str, allowed: str = "") -> str:
    """The text with backslash escapes for what could control a terminal, and for what no encoding can write.

    `allowed`: unprintable characters that are kept.
    """
    return "".join(
        char if char.isprintable() or char in allowed else char.encode("unicode_escape", "surrogatepass").decode()
        for char in text
    )


def quote(text: str) -> str:
    """The text's lines, marked as quoted."""
    return "\n".join(f"    | {line}" for line in escape(text, NEWLINE_AND_TAB).split("\n"))


def format_time(at: float) -> str:
    """ISO 8601 with the local zone's offset; `at` is in seconds since the epoch."""
    return datetime.fromtimestamp(at).astimezone().isoformat(timespec="seconds")


def format_age(seconds: float) -> str:
    """The two largest units: 5s, 3m05s, 2h03m, 4d07h."""
    whole = max(0, int(seconds))
    for index, (unit, size) in enumerate(AGE_UNITS):
        if whole >= size:
            next_unit, next_size = AGE_UNITS[index + 1] if index + 1 < len(AGE_UNITS) else ("s", 1)
            return f"{whole // size}{unit}{whole % size // next_size:02d}{next_unit}"
    return f"{whole}s"


def format_count(count: int, noun: str) -> str:
    """The count with its noun in singular or plural: 1 token, 2 tokens."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def import_package(module: str, key: str, value: str, alternative: str = "") -> Any:
    """The module; if its package is missing, raises ConfigError with the setting that needs it.

    `alternative`: what else the user can do, after "pip install ...".
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        way_out = f"pip install {module.partition('.')[0]}{alternative}"
        raise ConfigError(key, value, f"the package {error.name} is not installed", way_out) from error


def text_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, align: str = "<") -> str:
    """The header and the rows as lines of equally wide columns, without a line break at the end.

    `align` has `<` (flush left) or `>` (flush right) for each column; the last character holds for all further
    columns, so that `<>` sets the first column left and the others right. Spaces at the end of a line are left out.
    """
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sides = align.ljust(len(header), align[-1])
    return "\n".join(
        GAP.join(f"{cell:{side}{width}}" for cell, side, width in zip(line, sides, widths, strict=False)).rstrip()
        for line in lines
    )
