"""The commands `trajectories ls`, which lists a journal's sessions, and `trajectories show`, which prints one."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import time

from seamless_verl.cli.output import (
    NEWLINE_AND_TAB,
    escape,
    format_age,
    format_count,
    format_time,
    import_package,
    quote,
    text_table,
    write,
)
from seamless_verl.errors import ConfigError, JournalError
from seamless_verl.journal import JournalReader, SessionSummary, Stage, StoredSession
from seamless_verl.journal.stored import rebuild_record
from seamless_verl.tools.trajectories.drift import Decode, find_drifts
from seamless_verl.tools.trajectories.recorded import TRAIN_ALL, Recorded, recorded
from seamless_verl.tools.trajectories.session_text import format_session
from seamless_verl.trajectory.account import Account
from seamless_verl.trajectory.policies import parse_policy
from seamless_verl.trajectory.sequences import assemble
from seamless_verl.trajectory.tree import PlacedTurn, concat_ids

JOURNAL_FILE = "trajectories.sqlite"
WAY_OUT = f"Give the file that a run writes: {JOURNAL_FILE} beside its checkpoints, or seamless.gateway.journal"
NO_GATEWAY = f"{WAY_OUT}. A run without seamless.gateway.enabled=true has none"
MAX_LISTED = 5  # sessions or journals named in an error message
HEADER = ("SESSION", "UID", "STAGE", "REASON", "OUTCOME", "CALLS", "TOKENS", "OPENED", "AGE")
ALIGN = "<<<<<>><>"
LISTED = ("session_id", "uid", "stage", "opened_at", "calls", "tokens", "reason", "outcome")  # in JSON
NO_WRITER = "No run writes this journal now. What is open was cut off with its run; the next one here abandons it"


def open_journal(path: Path) -> JournalReader:
    """Raises ConfigError if there is no journal at `path`, or a newer release made it."""
    if path.is_dir():
        journals = sorted(map(str, [*path.glob(JOURNAL_FILE), *path.glob(f"*/{JOURNAL_FILE}")]))
        way_out = f"There is {_list_some(journals)}" if journals else NO_GATEWAY
        raise ConfigError("JOURNAL", str(path), "it is a folder, and a journal is one file", way_out)
    if not path.is_file():
        raise ConfigError("JOURNAL", str(path), "there is no such file", NO_GATEWAY)
    reader = JournalReader(path)
    try:
        reader.stage("")
    except JournalError as error:
        raise ConfigError("JOURNAL", str(path), f"it cannot be read as a journal ({error.reason})", WAY_OUT) from error
    return reader


def _list_some(names: list[str]) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return f"{', '.join(names[:MAX_LISTED])}{more}"


def find_session(reader: JournalReader, prefix: str) -> StoredSession:
    """The session whose id is `prefix`, or the only one whose id begins with it; raises ConfigError otherwise."""
    exact = reader.read(prefix)
    if exact is not None:
        return exact
    ids = [summary.session_id for summary in reader.sessions() if summary.session_id.startswith(prefix)]
    if len(ids) > 1:
        raise ConfigError("SESSION", prefix, f"{len(ids)} sessions begin so", f"Give more of the id: {_list_some(ids)}")
    session = reader.read(ids[0]) if ids else None
    if session is None:
        way_out = f"`seamless-verl trajectories ls {reader.path}` lists those there are"
        raise ConfigError("SESSION", prefix, "no session's id is this or begins so", way_out)
    return session


def list_sessions(args: argparse.Namespace) -> None:
    """Raises ConfigError for a limit below 1, or if the file is not a journal."""
    if args.limit is not None and args.limit < 1:
        raise ConfigError("--limit", args.limit, "that lists nothing", "Give 1 or more, or leave it out")
    reader = open_journal(args.journal)
    sessions = [
        session
        for session in reader.sessions()
        if args.uid in (None, session.uid) and args.stage in (None, str(session.stage))
    ]
    listed = sessions[-args.limit :] if args.limit else sessions
    now = time()
    if args.json:
        for session in listed:
            ages = {"opened": format_time(session.opened_at), "age_s": round(now - session.opened_at, 3)}
            write(json.dumps({name: getattr(session, name) for name in LISTED} | ages))
        return
    table = text_table(HEADER, [_cells(session, now) for session in listed], align=ALIGN)
    write(f"{table}\n{_totals(sessions, len(listed))}")
    if any(session.stage is Stage.OPEN for session in sessions) and not reader.has_writer():
        write(NO_WRITER)


def _cells(session: SessionSummary, now: float) -> tuple[str, ...]:
    """The session's row, in the order of the header."""
    return (
        escape(session.session_id),
        escape(session.uid),
        str(session.stage),
        escape(session.reason or "-"),
        session.outcome,
        str(session.calls),
        str(session.tokens),
        format_time(session.opened_at),
        format_age(now - session.opened_at),
    )


def _totals(sessions: Sequence[SessionSummary], listed: int) -> str:
    """Totals of all selected sessions, also of those that the limit leaves out."""
    stages = Counter(session.stage for session in sessions)
    parts = ", ".join(f"{stages[stage]} {stage}" for stage in Stage if stages[stage])
    shown = f", the newest {listed} listed" if listed < len(sessions) else ""
    calls, tokens = sum(session.calls for session in sessions), sum(session.tokens for session in sessions)
    counts = f"{format_count(calls, 'call')}, {format_count(tokens, 'token')} generated"
    outcomes = Counter("trained" if o.startswith("step ") else o for o in (s.outcome for s in sessions) if o != "-")
    groups = "".join(f", {count} {outcome}" for outcome, count in sorted(outcomes.items()))
    return f"{format_count(len(sessions), 'session')}{f' ({parts})' if parts else ''}{groups}{shown}: {counts}"


def show_session(args: argparse.Namespace) -> None:
    """Raises ConfigError if there is no such session, policy or model."""
    reader = open_journal(args.journal)
    parse_policy(args.policy or TRAIN_ALL)
    if args.text and args.model is None:
        raise ConfigError("--text", True, "tokens become text by a tokenizer", "Add --model PATH, a model's folder")
    stored = find_session(reader, args.session)
    decode = None if args.model is None else load_decoder(args.model)
    record = rebuild_record(stored, all_calls=True)
    run = recorded(stored, args.policy, args.version, args.grammar)
    policy = parse_policy(run.policy)
    text = format_session(
        record, policy, run.version, run.limits, grammar=run.grammar, dropped=run.dropped, decode=decode
    )
    parts = [escape(text, NEWLINE_AND_TAB), *_stored_facts(stored, run)]
    account = run.account(assemble(record, policy, run.version, run.limits, run.grammar).account)
    parts.append(f"{format_account(account)}, by {run.policy} at version {run.version}")
    if args.text and decode is not None:
        for drift in find_drifts(record.tree, decode=decode):
            parts += [f"drift of {escape(drift.turn_id)} at token {drift.at_token}, recorded:"]
            parts += [quote(decode(drift.recorded_ids)), "replayed:", quote(decode(drift.replayed_ids))]
    if args.text or args.request:
        parts += [_format_turn(turn, decode if args.text else None, args.request) for turn in record.turns]
    write("\n".join(parts))


def format_account(account: Account) -> str:
    """Generated = trained + dropped, with the count of each reason."""
    reasons = ", ".join(f"{count} {reason}" for reason, count in account.dropped.items())
    dropped = sum(account.dropped.values())
    by_reason = f" ({reasons})" if reasons else ""
    return f"account: {account.generated} generated = {account.trained} trained + {dropped} dropped{by_reason}"


def format_advantage(advantage: tuple[float, float, float]) -> str:
    """Its mean over trained tokens, and its range if they differ."""
    mean, least, greatest = advantage
    return f"{mean:.4g}" + (f" (mean; {least:.4g} to {greatest:.4g})" if greatest > least else "")


def load_decoder(model: Path) -> Decode:
    """A function from token ids to text, special tokens included, by the tokenizer in this folder only."""
    if not model.is_dir():
        raise ConfigError("--model", str(model), "there is no such folder", "Give the folder of the model that ran")
    transformers = import_package("transformers", "--model", str(model), ", or leave --model out")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(model), local_files_only=True)
    except Exception as error:  # that of a file that is none has no narrower type
        way_out = "Give a folder with one, or download it again, in a git repository by `git lfs pull`"
        reason = f"it has no tokenizer that can be read: {error}"
        raise ConfigError("--model", str(model), reason, way_out) from error

    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))


def _stored_facts(stored: StoredSession, run: Recorded) -> Iterator[str]:
    """Stage, rewards, weight versions and calls without an end, a line each."""
    reason = "" if stored.reason is None else f" ({escape(stored.reason)})"
    yield f"stage: {stored.stage}{reason}, opened {format_time(stored.opened_at)}"
    why = stored.handed.get("reason")
    if stored.outcome != "-":
        yield f"outcome: {stored.outcome}{f' ({escape(str(why))})' if why else ''}"
    limits = ", ".join(f"{name}={value}" for name, value in stored.handing.get("limits", {}).items() if value)
    if limits:
        yield f"limits: {limits}"
    yield f"rewards: {', '.join(f'{escape(name)}={value!r}' for name, value in stored.rewards.items()) or 'none'}"
    if run.advantage is not None:
        yield f"advantage: {format_advantage(run.advantage)}"
    versions: Counter[int] = Counter()
    for segment in (segment for call in stored.calls for segment in call.segments):
        versions[segment.version] += len(segment)
    counts = ", ".join(f"v{version} {format_count(versions[version], 'token')}" for version in sorted(versions))
    yield f"weight versions: {counts or 'none'}"
    interrupted = ", ".join(escape(call.call_id) for call in stored.calls if call.interrupted)
    if interrupted:
        yield f"without an end: {interrupted} (running or cut off; read here as cancelled)"


def _format_turn(turn: PlacedTurn, decode: Decode | None, with_request: bool) -> str:
    new_ids = turn.image_keys.restored(concat_ids(turn.prompt_end.path_from(turn.match_end)))
    prompt_length = len(turn.prompt_ids())
    head = f"turn {escape(turn.turn_id)} ({turn.finish}): read {prompt_length} tokens, {len(new_ids)} of them new"
    lines = [f"\n{head}, wrote {turn.generated}"]
    if decode is not None:
        lines += ["  read, what is new:", quote(decode(new_ids)), "  wrote:", quote(decode(turn.generated_ids()))]
    if with_request:
        for name, value in (("request", turn.request), ("reply", turn.reply)):
            lines += [f"  {name}:", quote(json.dumps(value, indent=2, ensure_ascii=False))]
    return "\n".join(lines)
