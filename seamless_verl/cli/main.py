"""The tree of subcommands, and the one place where a user's mistake becomes a line and an exit code.

A command is a module with `add`, which puts its parsers into the tree; each of them names its function as `run`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from seamless_verl.cli import plan as planning
from seamless_verl.cli import trajectories
from seamless_verl.errors import ConfigError, JournalError

PROG = "seamless-verl"
MISTAKE, INTERRUPTED, BROKEN_PIPE = 2, 130, 141  # the last two as a shell counts death by SIGINT and SIGPIPE
COMMANDS = (trajectories.add, planning.add)


class Parser(argparse.ArgumentParser):
    """Tells a mistake in one line; subcommands inherit it."""

    def error(self, message: str) -> NoReturn:
        self.exit(MISTAKE, f"{self.prog}: {message}. See {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code, 2 for a mistake of the user's, told in a line on stderr."""
    args = parser().parse_args(argv)
    try:
        args.run(args)
        sys.stdout.flush()
    except (ConfigError, JournalError) as error:
        for problem in getattr(error, "problems", (error,)):  # of a config that has several
            sys.stderr.write(f"{PROG}: {' '.join(str(problem).split())}\n")
        return MISTAKE
    except BrokenPipeError:
        # The interpreter flushes once more at its end, and would complain then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def parser() -> argparse.ArgumentParser:
    whole: argparse.ArgumentParser = Parser(
        prog=PROG, description="What a person asks of a seamless_verl run from a terminal."
    )
    commands = whole.add_subparsers(metavar="COMMAND", required=True)
    for add in COMMANDS:
        add(commands)
    return whole
