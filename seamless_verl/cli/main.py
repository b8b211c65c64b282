"""The command line's entry point: the tree of subcommands, and the conversion of user errors to an exit code.

Each command is a module with `add_command`, which adds its parsers to the tree. Each parser names its function as
`run`. Only the module of the command that is run is imported: a runner's machine has few packages.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn, TypeAlias

from seamless_verl.errors import ConfigError, JournalError, OutsideApiError

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
PROG = "seamless-verl"
CHECK, CHECK_MODULE = "check", "seamless_verl.check"
USER_ERROR, INTERRUPTED, BROKEN_PIPE = 2, 130, 141  # the last two as a shell reports death by SIGINT and SIGPIPE
WITH_SETTINGS = ("compare", "plan")
"""Commands that take KEY=VALUE between their options."""
OVERRIDE = re.compile(r"[+]*[\w.@/-]+=|~[\w.@/-]+(?:=|$)")
COMMANDS = {
    CHECK: f"what a run with these KEY=VALUE would refuse: `python -m {CHECK_MODULE}`",
    "doctor": "what is wrong with this machine and this environment before any run, and how to mend it",
    "plan": "where everything of a run would be, and what it would need, without starting anything",
    "calibrate": "fit the simulator's constants to a run, for `plan --optimize`",
    "compare": "verl's trainers and ours on one job, interleaved, with a report",
    "trajectories": "list, show and export the sessions in a run's journal",
    "view": "show a run on a page: devices over time, metrics, sessions with every token",
    "runner": "run agents on tasks of a run that uses RunnerAgentLoop",
}
TOOLS = "seamless_verl.tools"
MODULES = {
    "doctor": f"{TOOLS}.doctor.command",
    "plan": f"{TOOLS}.plan.command",
    "calibrate": f"{TOOLS}.simulator.calibrate_command",
    "compare": f"{TOOLS}.compare.command",
    "trajectories": f"{TOOLS}.trajectories.command",
    "view": f"{TOOLS}.view.__main__",
    "runner": "seamless_verl.cli.runner",
}
OPTIMIZE = f"{TOOLS}.simulator.optimize_command"
"""What `plan --optimize` runs."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code. A user's mistake is 2, with one line per mistake on stderr.

    A command's function may return a code of its own; None is 0.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments[:1] == [CHECK]:  # hydra wants it to be a program of its own
        os.execv(sys.executable, [sys.executable, "-m", CHECK_MODULE, *arguments[1:]])
    if arguments and arguments[0] in WITH_SETTINGS:
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
        if name in MODULES and command in (None, name):
            module_of(name).add_command(commands)
        else:
            commands.add_parser(name, help=about)
    return parser


def add_parser(commands: Commands, name: str, about: str = "", *, more: str = "") -> argparse.ArgumentParser:
    """Adds a command's parser; it is described by its line in COMMANDS, or by `about`, and by `more` sentences."""
    about = about or COMMANDS[name]
    return commands.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.{more}")


def settings_first(arguments: Sequence[str], flags: Sequence[str], *, target: bool = True) -> list[str]:
    """The arguments with every KEY=VALUE before the options, wherever it was: argparse takes them in one place only.

    What follows an option is its value, unless the option is one of the `flags`, or the beginning of one. Words stay
    in order: those that follow a bracket that is open, since the shell split the setting; without a `target`, all.
    """
    from seamless_verl.config.words import is_open

    settings, others, last, opened = list[str](), list[str](), "", ""
    for word in arguments:
        free = not re.fullmatch("--[a-z-]+", last) or any(flag.startswith(last) for flag in flags)
        free, last = free and not word.startswith("-"), word
        if not free:
            others.append(word)
            continue
        is_setting = OVERRIDE.match(word) is not None
        text = f"{opened} {word}" if opened and not is_setting else word
        (settings if is_setting or opened or not target else others).append(word)
        opened = text if is_open(text) else ""
    first = others[:1] if others and not others[0].startswith("-") else []
    return [*first, *settings, *others[len(first) :]]
