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

from seamless_verl.cli import calibrate, check, compare, doctor, plan, runner, trajectories, view
from seamless_verl.cli.key_values import settings_first
from seamless_verl.errors import ConfigError, JournalError, OutsideApiError

PROG = "seamless-verl"
USER_ERROR, INTERRUPTED, BROKEN_PIPE = 2, 130, 141  # the last two as a shell reports death by SIGINT and SIGPIPE
COMMANDS = (
    *(check.add_command, doctor.add_command, plan.add_command, calibrate.add_command, compare.add_command),
    *(trajectories.add_command, view.add_command, runner.add_command),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code. A user's mistake is 2, with one line per mistake on stderr.

    A command's function may return a code of its own; None is 0.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments[:1] == [check.NAME]:
        check.become_check(arguments[1:])
    for command in (compare, plan):
        if arguments[:1] == [command.NAME]:
            arguments[1:] = settings_first(arguments[1:], command.FLAGS, target=command is compare)
    args = make_parser().parse_args(arguments)
    try:
        code: int | None = args.run(args)
        sys.stdout.flush()
    except (ConfigError, JournalError, OutsideApiError) as error:
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
    return code or 0


class Parser(argparse.ArgumentParser):
    """Reports a mistake in one line; subcommands inherit it."""

    def error(self, message: str) -> NoReturn:
        self.exit(USER_ERROR, f"{self.prog}: {message}. See {self.prog} --help\n")


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser: argparse.ArgumentParser = Parser(
        prog=PROG,
        description="Check, plan, compare or inspect seamless_verl runs or their machine, or run agents for them.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for add_command in COMMANDS:
        add_command(commands)
    return parser
