"""`seamless-verl check`: the same as `python -m seamless_verl.check`, which hydra wants to be a program of its own."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from seamless_verl.cli.commands import COMMANDS

NAME, MODULE = "check", "seamless_verl.check"


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds its line to the help of all commands; its arguments are hydra's, and not parsed here."""
    commands.add_parser(NAME, help=COMMANDS[NAME])


def become_check(arguments: Sequence[str]) -> NoReturn:
    """Replaces this process by the check."""
    os.execv(sys.executable, [sys.executable, "-m", MODULE, *arguments])
