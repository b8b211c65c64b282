"""The command line's entry point: the tree of subcommands, and the conversion of user errors to an exit code.

Each command is a module with `add_command`, which adds its parsers to the tree. Each parser names its function as
`run`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from seamless_verl.cli import plan, trajectories
from seamless_verl.errors import ConfigError, JournalError

PROG = "seamless-verl"
USER_ERROR, INTERRUPTED, BROKEN_PIPE = 2, 130, 141  # the last two as a shell reports death by SIGINT and SIGPIPE
COMMANDS = (trajectories.add_command, plan.add_command)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code. A user's mistake is 2, with one line per mistake on stderr."""
    args = make_parser().parse_args(argv)
    try:
        args.run(args)
        sys.stdout.flush()
    except (ConfigError, JournalError) as error:
        mistakes = error.mistakes if isinstance(error, ConfigError) else (error,)  # a config may have several
        for mistake in mistakes:
            sys.stderr.write(f"{PROG}: {' '.join(str(mistake).split())}\n")
        return USER_ERROR
    except BrokenPipeError:
        # The interpreter flushes stdout once more when it exits, and would report an error then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


class Parser(argparse.ArgumentParser):
    """Reports a mistake in one line; subcommands inherit it."""

    def error(self, message: str) -> NoReturn:
        self.exit(USER_ERROR, f"{self.prog}: {message}. See {self.prog} --help\n")


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser: argparse.ArgumentParser = Parser(prog=PROG, description="Plan or inspect a seamless_verl run.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for add_command in COMMANDS:
        add_command(commands)
    return parser
