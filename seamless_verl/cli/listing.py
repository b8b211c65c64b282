"""`trajectories ls`."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from time import time

from seamless_verl.cli.reading import opened
from seamless_verl.cli.text import age, columns, counted, local_time, plain, write
from seamless_verl.errors import ConfigError
from seamless_verl.trajectory.journal import SessionSummary, Stage

HEADER = ("SESSION", "UID", "STAGE", "REASON", "CALLS", "TOKENS", "OPENED", "AGE")
LEFT = "No run writes this journal now. What is open was cut off with its run; the next one here abandons it"
NUMBERS = (4, 5, 7)  # columns set flush right


def list_sessions(args: argparse.Namespace) -> None:
    """Raises ConfigError for a limit under 1, and for what is no journal."""
    if args.limit is not None and args.limit < 1:
        raise ConfigError("--limit", args.limit, "that lists nothing", "Give 1 or more, or leave it out")
    reader = opened(args.journal)
    sessions = [one for one in reader.sessions() if _wanted(one, args.uid, args.stage)]
    listed = sessions[-args.limit :] if args.limit else sessions
    now = time()
    if args.json:
        for one in listed:
            write(_json(one, now))
        return
    lines = [HEADER, *(_cells(one, now) for one in listed)]
    write("\n".join([*columns(lines, NUMBERS), _totals(sessions, len(listed))]))
    if any(one.stage is Stage.OPEN for one in sessions) and not reader.is_written():
        write(LEFT)


def _wanted(one: SessionSummary, uid: str | None, stage: str | None) -> bool:
    return uid in (None, one.uid) and stage in (None, str(one.stage))


def _cells(one: SessionSummary, now: float) -> tuple[str, ...]:
    """A session's line in the order of the header."""
    names = (plain(one.session_id), plain(one.uid), str(one.stage), plain(one.reason or "-"))
    return (*names, str(one.calls), str(one.tokens), local_time(one.opened_at), age(now - one.opened_at))


def _json(one: SessionSummary, now: float) -> str:
    return json.dumps({**asdict(one), "opened": local_time(one.opened_at), "age_s": round(now - one.opened_at, 3)})


def _totals(sessions: Sequence[SessionSummary], listed: int) -> str:
    """Over all that were asked for, also those that a limit leaves out."""
    stages = Counter(one.stage for one in sessions)
    parts = ", ".join(f"{stages[stage]} {stage}" for stage in Stage if stages[stage])
    shown = f", the newest {listed} listed" if listed < len(sessions) else ""
    calls, tokens = sum(one.calls for one in sessions), sum(one.tokens for one in sessions)
    counts = f"{counted(calls, 'call')}, {counted(tokens, 'token')} generated"
    return f"{counted(len(sessions), 'session')}{f' ({parts})' if parts else ''}{shown}: {counts}"
