"""Text for a terminal.

Packages that one option alone needs, imported when it is given.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from seamless_verl.errors import ConfigError

KEPT = "\n\t"
AGES = (("d", 86400), ("h", 3600), ("m", 60))


def write(text: str) -> None:
    sys.stdout.write(text + "\n")


def plain(text: str, kept: str = "") -> str:
    """The text with what could steer a terminal, and what no encoding can write, as backslash escapes."""
    return "".join(
        char if char.isprintable() or char in kept else char.encode("unicode_escape", "surrogatepass").decode()
        for char in text
    )


def quoted(text: str) -> str:
    """Lines set off from what is ours."""
    return "\n".join(f"    | {line}" for line in plain(text, KEPT).split("\n"))


def columns(lines: Sequence[Sequence[str]], right: Sequence[int]) -> list[str]:
    """Lines of equally many cells under each other, those of the columns `right` flush right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(_cell(text, widths[i], i in right) for i, text in enumerate(line)).rstrip() for line in lines]


def _cell(text: str, width: int, right: bool) -> str:
    return text.rjust(width) if right else text.ljust(width)


def local_time(at: float) -> str:
    """ISO 8601 with the local zone's offset; `at` is in seconds since the epoch."""
    return datetime.fromtimestamp(at).astimezone().isoformat(timespec="seconds")


def age(seconds: float) -> str:
    """The two largest units: 5s, 3m05s, 2h03m, 4d07h."""
    whole = max(0, int(seconds))
    for place, (unit, size) in enumerate(AGES):
        if whole >= size:
            below, less = AGES[place + 1] if place + 1 < len(AGES) else ("s", 1)
            return f"{whole // size}{unit}{whole % size // less:02d}{below}"
    return f"{whole}s"


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def needed(module: str, key: str, value: str, otherwise: str = "") -> Any:
    """The module; raises ConfigError naming the setting that needs it, and the package that is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        way_out = f"pip install {module.partition('.')[0]}{otherwise}"
        raise ConfigError(key, value, f"the package {error.name} is not installed", way_out) from error
