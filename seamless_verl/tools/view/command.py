"""The command `seamless-verl view`: a page that shows a run in its folder, while it runs or after it."""

from __future__ import annotations

import argparse
import secrets
import sys
from contextlib import suppress
from pathlib import Path

from seamless_verl.cli.main import COMMANDS
from seamless_verl.cli.output import write
from seamless_verl.errors import ConfigError, JournalError

ABOUT = COMMANDS["view"]
HOST = "127.0.0.1"


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the tree of subcommands."""
    parser = commands.add_parser("view", help=ABOUT, description=f"{ABOUT[0].upper()}{ABOUT[1:]}. Ctrl-C ends it.")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a run's trainer.default_local_dir, or above it")
    parser.add_argument("--port", type=int, default=0, metavar="N", help="where it listens; default: any that is free")
    parser.add_argument(
        "--host", default=HOST, help=f"default: {HOST}, for this machine alone; 0.0.0.0 for all that reach it"
    )
    parser.add_argument(
        "--model", type=Path, metavar="PATH", help="a folder with the model's tokenizer, if the run's is not there"
    )
    parser.set_defaults(run=show_run)


def show_run(args: argparse.Namespace) -> None:
    """Serves until it is interrupted; raises ConfigError for a folder without a run, or a port that is taken."""
    from seamless_verl.tools.view.folder import find_run
    from seamless_verl.tools.view.run import RunView
    from seamless_verl.tools.view.server import address_of, listen, require, serve

    if args.model is not None and not args.model.is_dir():
        raise ConfigError(
            "--model", str(args.model), "there is no such folder", "Give the folder of the model that ran"
        )
    folder = find_run(args.folder)
    run = RunView(folder, model=None if args.model is None else str(args.model))
    try:
        run.read_journals()
    except JournalError as error:
        way_out = "Move the file away, or restore it"
        raise ConfigError("FOLDER", str(folder), f"its journal cannot be read: {error.reason}", way_out) from error
    require()
    with listen(args.host, args.port, key="--") as listening:
        token = secrets.token_urlsafe(16)
        write(f"{folder}\n{address_of(listening, token)}")
        sys.stdout.flush()
        with suppress(KeyboardInterrupt):  # which is how it is ended
            serve(run, listening, token)
