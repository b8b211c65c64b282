"""Opens a journal for reading, finds a session by its id, and rebuilds the session's record."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from seamless_verl.errors import ConfigError, JournalError
from seamless_verl.journal import GroupOutcome, JournalReader, Stage, StoredSession
from seamless_verl.trajectory.account import Account, DropReason
from seamless_verl.trajectory.policies import GrammarTokens, TokenPolicy, make_policy
from seamless_verl.trajectory.sequences import SequenceLimits
from seamless_verl.trajectory.session import Closed, SessionRecord

TRAIN_ALL = "train_all"
JOURNAL_FILE = "trajectories.sqlite"
WAY_OUT = f"Give the file that a run writes: {JOURNAL_FILE} beside its checkpoints, or seamless.gateway.journal"
NO_GATEWAY = f"{WAY_OUT}. A run without seamless.gateway.enabled=true has none"
LIFETIME_OVER = "its lifetime is over"  # the reason of an expired session; other reasons are the members' own values
MAX_LISTED = 5  # sessions or journals named in an error message


def open_journal(path: Path) -> JournalReader:
    """Raises ConfigError if there is no journal at `path`, or a newer release made it."""
    if path.is_dir():
        raise ConfigError("JOURNAL", str(path), "it is a folder, and a journal is one file", _list_journals(path))
    if not path.is_file():
        raise ConfigError("JOURNAL", str(path), "there is no such file", NO_GATEWAY)
    reader = JournalReader(path)
    try:
        reader.stage("")
    except JournalError as error:
        raise ConfigError("JOURNAL", str(path), f"it cannot be read as a journal ({error.reason})", WAY_OUT) from error
    return reader


def _list_journals(folder: Path) -> str:
    """The journals in the folder or in its subfolders, by their usual name, as the way out of an error."""
    journals = sorted(map(str, [*folder.glob(JOURNAL_FILE), *folder.glob(f"*/{JOURNAL_FILE}")]))
    return f"There is {_list_some(journals)}" if journals else NO_GATEWAY


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


def rebuild_for_display(stored: StoredSession) -> SessionRecord:
    """The session's record with all its calls; a call without an end is a cancelled turn, also in an open session."""
    record = SessionRecord(stored.uid, stored.session_id)
    for call in stored.calls:
        record.add_turn(call.turn())
    for name, value in stored.rewards.items():
        record.post_reward(value, name)
    if stored.stage is not Stage.OPEN:
        record.close(_parse_close_reason(stored.reason))
    return record


def _parse_close_reason(reason: str | None) -> Closed:
    if reason == LIFETIME_OVER:
        return Closed.EXPIRED
    return Closed(reason) if reason in set(Closed) else Closed.FINISHED


def newest_version(stored: StoredSession) -> int:
    """The newest weight version that generated tokens of the session; 0 if there are none."""
    return max((segment.version for call in stored.calls for segment in call.segments), default=0)


@dataclass(frozen=True)
class Recorded:
    """How a run treated a session: its limits and policies, the trainer's version, and why nothing of it was trained.

    `dropped` is None for a session that was trained, waits to be trained (`queued`), or of which it is not known.
    """

    limits: SequenceLimits
    policy: str
    version: int
    grammar: GrammarTokens
    dropped: DropReason | None = None
    queued: bool = False

    def account(self, account: Account) -> Account:
        """The account of its sequences, as the run counted it."""
        return account if self.dropped is None else account.discarded(self.dropped)


def recorded(
    stored: StoredSession, policy: str | None = None, version: int | None = None, grammar: str | None = None
) -> Recorded:
    """What the journal has of it; `policy`, `version` and `grammar` are the user's own, in place of the run's."""
    limits = SequenceLimits(**stored.handing.get("limits", {}))
    details = {} if stored.group is None else stored.group.details
    if version is None:
        version = details.get("version", newest_version(stored))
    dropped = None
    if stored.stage is not Stage.OPEN and stored.handed.get("kept") is False:
        dropped = DropReason(stored.handed.get("dropped", DropReason.SESSION))
    elif stored.validation:
        dropped = DropReason.VALIDATION
    elif stored.group is not None and stored.group.outcome is not GroupOutcome.TRAINED:
        dropped = DropReason.DEFERRED if stored.group.outcome is GroupOutcome.DEFERRED else DropReason.GROUP
    elif stored.group is not None and stored.stage in (Stage.OPEN, Stage.CLOSED):  # it was trained without this one
        dropped = DropReason.RUNNER_LOST if stored.reason == Closed.RUNNER_LOST else DropReason.SESSION
    elif "pivot" in details and stored.settings.get("metadata", {}).get("session") == details["pivot"]:
        dropped = DropReason.PIVOT
    queued = stored.outcome == "queued"
    policy = policy or details.get("policy", TRAIN_ALL)
    tokens = GrammarTokens(grammar or stored.handing.get("grammar", GrammarTokens.MASK_FORCED))
    return Recorded(limits, str(policy), int(version), tokens, dropped, queued)


def parse_policy(text: str) -> TokenPolicy:
    """The policy of `NAME` or `NAME:k`; raises ConfigError with the way out."""
    name, colon, bound = text.partition(":")
    if not colon:
        return make_policy(name)
    if not bound.isdecimal():
        way_out = "Give a whole number of versions, 0 or more, as in mask_older_than:1"
        raise ConfigError("--policy", text, f"{bound!r} is no bound", way_out)
    policy = make_policy(name, int(bound))
    if "policy/max_staleness" not in policy.metrics():
        raise ConfigError("--policy", text, f"{name} takes no bound", f"Give {name} alone, or a policy with a bound")
    return policy
