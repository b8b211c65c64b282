"""The commands `seamless-verl trajectories`: list, show and export the sessions of a journal, also during a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from seamless_verl.cli.main import Commands, add_parser
from seamless_verl.journal import Stage
from seamless_verl.tools.trajectories.export import FORMATS, export_sessions
from seamless_verl.tools.trajectories.show import list_sessions, show_session
from seamless_verl.trajectory.policies import POLICIES, GrammarTokens


def add_command(commands: Commands) -> None:
    """Adds the commands to the tree of subcommands."""
    verbs = add_parser(commands, "trajectories").add_subparsers(metavar="COMMAND", required=True)
    ls = add_parser(verbs, "ls", "one line for each session, the newest last, and the totals")
    show = add_parser(verbs, "show", "one session: its tree, trained tokens, rewards, drift, token account")
    export = add_parser(verbs, "export", "the training sequences of all closed sessions, one row per sequence")
    for verb, run in ((ls, list_sessions), (show, show_session), (export, export_sessions)):
        verb.add_argument(
            "journal", type=Path, metavar="JOURNAL", help="trajectories.sqlite, beside a run's checkpoints"
        )
        verb.set_defaults(run=run)
    show.add_argument("session", metavar="SESSION", help="a session's id, or the beginning of it")
    for verb in (ls, export):
        verb.add_argument("--uid", help="only sessions of this prompt")
    for verb in (show, export):
        _add_training_options(verb)
    ls.add_argument("--stage", choices=[str(stage) for stage in Stage], help="only sessions at this stage")
    ls.add_argument("--limit", type=int, metavar="N", help="only the newest N")
    ls.add_argument("--json", action="store_true", help="one JSON object a line, without header and totals")
    show.add_argument("--request", action="store_true", help="also each turn's request and reply")
    show.add_argument(
        "--text", action="store_true", help="also each turn's new prompt tokens and its reply, as text; needs --model"
    )
    show.add_argument(
        "--model", type=Path, metavar="PATH", help="a model's folder; its tokenizer also makes drift causes certain"
    )
    export.add_argument(
        "--out", type=Path, metavar="FILE", required=True, help="replaced when the new file is complete"
    )
    export.add_argument("--format", choices=list(FORMATS), default="jsonl", help="default: jsonl")


def _add_training_options(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--policy",
        metavar="NAME[:k]",
        help=f"which tokens are fresh enough to train: {', '.join(POLICIES)}; k is the maximum staleness, 0 if not "
        "given. Default: that of the run when it trained the session, or train_all",
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
