"""The commands `seamless-verl trajectories`: list, show and export the sessions of a journal, also during a run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TypeAlias

from seamless_verl.cli.export import FORMATS, export_sessions
from seamless_verl.cli.main import COMMANDS
from seamless_verl.cli.show import list_sessions, show_session
from seamless_verl.journal import Stage
from seamless_verl.trajectory.policies import POLICIES, GrammarTokens

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_command(commands: Commands) -> None:
    """Adds the commands to the tree of subcommands."""
    about = COMMANDS["trajectories"]
    group = commands.add_parser("trajectories", help=about, description=f"{about[0].upper()}{about[1:]}.")
    verbs = group.add_subparsers(metavar="COMMAND", required=True)
    _add_ls(verbs)
    _add_show(verbs)
    _add_export(verbs)


def _add_ls(verbs: Commands) -> None:
    ls = _add_verb(verbs, "ls", "one line for each session, the newest last, and the totals")
    ls.add_argument("--uid", help="only sessions of this prompt")
    ls.add_argument("--stage", choices=[str(stage) for stage in Stage], help="only sessions at this stage")
    ls.add_argument("--limit", type=int, metavar="N", help="only the newest N")
    ls.add_argument("--json", action="store_true", help="one JSON object a line, without header and totals")
    ls.set_defaults(run=list_sessions)


def _add_show(verbs: Commands) -> None:
    show = _add_verb(verbs, "show", "one session: its tree, trained tokens, rewards, drift, token account")
    show.add_argument("session", metavar="SESSION", help="a session's id, or the beginning of it")
    _add_training_options(show)
    show.add_argument("--request", action="store_true", help="also each turn's request and reply")
    show.add_argument(
        "--text", action="store_true", help="also each turn's new prompt tokens and its reply, as text; needs --model"
    )
    show.add_argument(
        "--model", type=Path, metavar="PATH", help="a model's folder; its tokenizer also makes drift causes certain"
    )
    show.set_defaults(run=show_session)


def _add_export(verbs: Commands) -> None:
    export = _add_verb(verbs, "export", "the training sequences of all closed sessions, one row per sequence")
    export.add_argument(
        "--out", type=Path, metavar="FILE", required=True, help="replaced when the new file is complete"
    )
    export.add_argument("--format", choices=list(FORMATS), default="jsonl", help="default: jsonl")
    export.add_argument("--uid", help="only sessions of this prompt")
    _add_training_options(export)
    export.set_defaults(run=export_sessions)


def _add_verb(verbs: Commands, name: str, about: str) -> argparse.ArgumentParser:
    verb = verbs.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".")
    verb.add_argument("journal", type=Path, metavar="JOURNAL", help="trajectories.sqlite, beside a run's checkpoints")
    return verb


def _add_training_options(verb: argparse.ArgumentParser) -> None:
    names = ", ".join(POLICIES)
    verb.add_argument(
        "--policy",
        metavar="NAME[:k]",
        help=f"which tokens are fresh enough to train: {names}; k is the maximum staleness, 0 if not given. "
        "Default: that of the run when it trained the session, or train_all",
    )
    verb.add_argument(
        "--grammar",
        choices=[policy.value for policy in GrammarTokens],
        help="what is trained of tokens that were sampled under a grammar. Default: that of the run, or mask_forced",
    )
    verb.add_argument(
        "--version",
        type=int,
        metavar="V",
        help="the trainer's weight version. Default: as of the policy, or the session's newest",
    )
