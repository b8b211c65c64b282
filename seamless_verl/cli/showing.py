"""`trajectories show`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from seamless_verl.cli.packages import needed
from seamless_verl.cli.reading import found, newest_version, opened, parsed_policy, rebuilt
from seamless_verl.cli.text import KEPT, counted, local_time, plain, quoted, write
from seamless_verl.errors import ConfigError
from seamless_verl.trajectory import journal
from seamless_verl.trajectory.account import Account
from seamless_verl.trajectory.assemble import assemble
from seamless_verl.trajectory.drift import Decode, drifts_of
from seamless_verl.trajectory.nodes import spelled
from seamless_verl.trajectory.session import SessionRecord
from seamless_verl.trajectory.show import show
from seamless_verl.trajectory.tree import PlacedTurn


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


def _facts(recorded: journal.SessionRecord) -> Iterator[str]:
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
