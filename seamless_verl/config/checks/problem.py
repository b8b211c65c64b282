"""What a check finds, and the error that carries all findings at once."""

from __future__ import annotations

from dataclasses import dataclass

from seamless_verl.errors import ConfigError


class AbsentError(ConfigError):
    """Data or a model that is not there, and that a recipe may be about to make."""


@dataclass(frozen=True)
class Problem:
    """A setting that cannot work, in the terms of ConfigError; a warning when it may still work."""

    key: str
    value: object
    reason: str
    way_out: str
    warning: bool = False

    @classmethod
    def of(cls, error: ConfigError, *, unmade: bool = False) -> Problem:
        """A warning for what is absent, where that may be because it is `unmade`."""
        warning = unmade and isinstance(error, AbsentError)
        return cls(error.key, error.value, error.reason, error.way_out, warning)

    def __str__(self) -> str:
        return str(ConfigError(self.key, self.value, self.reason, self.way_out))


class RefusedConfigError(ConfigError):
    """A config with at least one problem: it is the first, and its text lists the others, one a line."""

    def __init__(self, first: Problem, *others: Problem) -> None:
        super().__init__(first.key, first.value, first.reason, first.way_out)
        self.problems = (first, *others)
        self.args = self.problems

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)
