"""`trajectories ls`.

`trajectories show`.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from time import time
from typing import Any

from seamless_verl import journal
from seamless_verl.cli.reading import found, newest_version, opened, parsed_policy, rebuilt
from seamless_verl.cli.text import KEPT, age, columns, counted, local_time, needed, plain, quoted, write
from seamless_verl.errors import ConfigError
from seamless_verl.journal import SessionSummary, Stage
from seamless_verl.trajectory.account import Account
from seamless_verl.trajectory.drift import Decode, drifts_of
from seamless_verl.trajectory.sequences import assemble
from seamless_verl.trajectory.session import SessionRecord
from seamless_verl.trajectory.show import show
from seamless_verl.trajectory.tree import PlacedTurn, spelled

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


def show_session(args: argparse.Namespace) -> None:
    """Raises ConfigError for a session, policy or model that is not there."""
    policy, reader = parsed_policy(args.policy), opened(args.journal)
    if args.text and args.model is None:
        raise ConfigError("--text", True, "tokens become text by a tokenizer", "Add --model PATH, a model's folder")
    recorded = found(reader, args.session)
    decode = None if args.model is None else decoder(args.model)
    session = rebuilt(recorded)
    version = newest_version(recorded) if args.version is None else args.version
    parts = [plain(show(session, policy, version, decode=decode), KEPT), *_facts(recorded)]
    parts.append(f"{account_line(assemble(session, policy, version).account)}, by {args.policy} at version {version}")
    if args.text and decode is not None:
        parts += _differences(session, decode)
    if args.text or args.request:
        parts += [_turn(turn, decode if args.text else None, args.request) for turn in session.turns]
    write("\n".join(parts))


def account_line(account: Account) -> str:
    """Generated = trained + dropped, by reason."""
    reasons = ", ".join(f"{count} {reason}" for reason, count in account.dropped.items())
    dropped = sum(account.dropped.values())
    listed = f" ({reasons})" if reasons else ""
    return f"account: {account.generated} generated = {account.trained} trained + {dropped} dropped{listed}"


def decoder(model: Path) -> Decode:
    """Text of token ids, special tokens included, by the tokenizer in the folder; never one from elsewhere."""
    if not model.is_dir():
        raise ConfigError("--model", str(model), "there is no such folder", "Give the folder of the model that ran")
    transformers = needed("transformers", "--model", str(model), ", or leave --model out")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(model), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError("--model", str(model), f"it has no tokenizer: {error}", "Give a folder with one") from error

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False))

    return decode


def _facts(recorded: journal.StoredSession) -> Iterator[str]:
    reason = "" if recorded.reason is None else f" ({plain(recorded.reason)})"
    yield f"stage: {recorded.stage}{reason}, opened {local_time(recorded.opened_at)}"
    yield f"rewards: {', '.join(f'{plain(name)}={value!r}' for name, value in recorded.rewards.items()) or 'none'}"
    versions: dict[int, int] = {}
    for segment in (segment for call in recorded.calls for segment in call.segments):
        versions[segment.version] = versions.get(segment.version, 0) + len(segment)
    counts = ", ".join(f"v{version} {counted(versions[version], 'token')}" for version in sorted(versions))
    yield f"weight versions: {counts or 'none'}"
    cut = ", ".join(plain(call.call_id) for call in recorded.calls if call.cut)
    if cut:
        yield f"without an end: {cut} (running or cut off; read here as cancelled)"


def _differences(session: SessionRecord, decode: Decode) -> Iterator[str]:
    for drift in drifts_of(session.tree, decode=decode):
        yield f"drift of {plain(drift.turn_id)} at token {drift.at_token}, recorded:"
        yield quoted(decode(drift.recorded_ids))
        yield f"replayed:\n{quoted(decode(drift.replayed_ids))}"


def _turn(turn: PlacedTurn, decode: Decode | None, request: bool) -> str:
    read = spelled(turn.prompt_end.up_to(turn.joined))
    whole = sum(map(len, turn.prompt_end.up_to(None)))
    head = f"turn {plain(turn.turn_id)} ({turn.finish}): read {whole} tokens, {len(read)} of them new"
    lines = [f"\n{head}, wrote {turn.generated}"]
    if decode is not None:
        lines += ["  read, what is new:", quoted(decode(read)), "  wrote:", quoted(decode(turn.generated_ids()))]
    if request:
        lines += ["  request:", _as_json(turn.request), "  reply:", _as_json(turn.reply)]
    return "\n".join(lines)


def _as_json(value: Mapping[str, Any]) -> str:
    return quoted(json.dumps(value, indent=2, ensure_ascii=False))
