"""A finding of the doctor: one subject, how bad it is, what was found, and the way out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from seamless_verl.config.checks.settings import Problem

GIB = 2**30


class Level(StrEnum):
    OK = "ok"
    """Nothing to do."""
    NOTE = "note"
    """Not in order, or not known, and no trouble for a run here."""
    WARNING = "warning"
    """A run works, but slower, or only in some layouts."""
    ERROR = "error"
    """A run fails, or would not be the run that is meant."""


@dataclass(frozen=True)
class Finding:
    """`way_out` is empty for what is in order, and only for that."""

    subject: str
    level: Level
    text: str
    way_out: str = ""

    def __post_init__(self) -> None:
        assert bool(self.way_out) == (self.level is not Level.OK), self

    def __str__(self) -> str:
        return f"{self.level}: {self.subject}: {self.text}. {self.way_out}".removesuffix(". ")


def ok(subject: str, text: str) -> Finding:
    return Finding(subject, Level.OK, text)


def note(subject: str, text: str, way_out: str) -> Finding:
    return Finding(subject, Level.NOTE, text, way_out)


def warning(subject: str, text: str, way_out: str) -> Finding:
    return Finding(subject, Level.WARNING, text, way_out)


def error(subject: str, text: str, way_out: str) -> Finding:
    return Finding(subject, Level.ERROR, text, way_out)


def of_problem(subject: str, problem: Problem) -> Finding:
    """A problem of the checks before a run, as a finding."""
    text = f"{problem.key}={problem.value!r}: {problem.reason}"
    return Finding(subject, Level.WARNING if problem.warning else Level.ERROR, text, problem.way_out)


def gib(size: int) -> str:
    """Bytes in GiB; in MiB where that is less than one."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size >> 20} MiB"
