"""The command `seamless-verl view`, and the process of a run's own view: `python -m seamless_verl.tools.view FOLDER`.

The first line on stdout of that process is the page's address. It has low priority, and ends with the run's process.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from contextlib import suppress
from pathlib import Path

from seamless_verl.cli.main import Commands, add_parser
from seamless_verl.errors import ConfigError, JournalError, exits_on_config_error
from seamless_verl.runtime.process import end_with_process
from seamless_verl.tools.view.folder import find_run
from seamless_verl.tools.view.run import RunView
from seamless_verl.tools.view.server import address_of, listen, require, serve

HOST = "127.0.0.1"
NICENESS = 10


def add_command(commands: Commands) -> None:
    """Adds the command to the tree of subcommands."""
    parser = add_parser(commands, "view", more=" Ctrl-C ends it.")
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
    with suppress(KeyboardInterrupt):  # which is how it is ended
        show(run, args.host, args.port, key="--", title=f"{folder}\n")


@exits_on_config_error
def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m seamless_verl.tools.view")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--ends-with", type=int, required=True, metavar="PID")
    args = parser.parse_args()
    end_with_process(args.ends_with)
    os.nice(NICENESS)
    require()
    show(RunView(args.folder), args.host, args.port, key="--")
    return 0


def show(run: RunView, host: str, port: int, *, key: str, title: str = "") -> None:
    """Prints the page's address and serves; ConfigError if it cannot listen there."""
    with listen(host, port, key=key) as listening:
        token = secrets.token_urlsafe(16)
        sys.stdout.write(f"{title}{address_of(listening, token)}\n")
        sys.stdout.flush()
        serve(run, listening, token)


if __name__ == "__main__":
    sys.exit(main())
