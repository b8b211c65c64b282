"""The command line's entry point: the tree of subcommands, and the conversion of user errors to an exit code.

Each command is a module with `add_command`, which adds its parsers to the tree. Each parser names its function as
`run`. Only the module of the command that is run is imported.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from seamless_verl.cli import check
from seamless_verl.cli.commands import COMMANDS, MODULES
from seamless_verl.errors import ConfigError, JournalError, OutsideApiError

PROG = "seamless-verl"
USER_ERROR, INTERRUPTED, BROKEN_PIPE = 2, 130, 141  # the last two as a shell reports death by SIGINT and SIGPIPE
WITH_SETTINGS = ("compare", "plan")
"""Commands that take KEY=VALUE between their options."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code. A user's mistake is 2, with one line per mistake on stderr.

    A command's function may return a code of its own; None is 0.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments[:1] == [check.NAME]:
        check.become_check(arguments[1:])
    if arguments and arguments[0] in WITH_SETTINGS:
        from seamless_verl.cli.key_values import settings_first

        name = arguments[0]
        arguments[1:] = settings_first(arguments[1:], module_of(name).FLAGS, target=name == "compare")
    args = make_parser(next((word for word in arguments if word in COMMANDS), "")).parse_args(arguments)
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


def module_of(command: str) -> Any:
    return import_module(MODULES[command])


def make_parser(command: str | None = None) -> argparse.ArgumentParser:
    """The parser of this command, beside which the others have their line in the help; None: of all commands."""
    parser: argparse.ArgumentParser = Parser(
        prog=PROG,
        description="Check, plan, compare or inspect seamless_verl runs or their machine, or run agents for them.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, about in COMMANDS.items():
        if command is None or command == name:
            module_of(name).add_command(commands)
        else:
            commands.add_parser(name, help=about)
    return parser
