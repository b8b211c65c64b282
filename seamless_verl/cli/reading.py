"""A journal's sessions: opened for reading, found by id, rebuilt as the trajectory record that was trained."""

from __future__ import annotations

from pathlib import Path

from seamless_verl import journal
from seamless_verl.errors import ConfigError, JournalError
from seamless_verl.journal import JournalReader, Stage
from seamless_verl.trajectory.policies import TokenPolicy, policy
from seamless_verl.trajectory.session import Closed, SessionRecord

FILE = "trajectories.sqlite"
WHICH = f"Give the file that a run writes: {FILE} beside its checkpoints, or seamless.gateway.journal"
LIFETIME_OVER = "its lifetime is over"  # the reason under which a session expires; other reasons are their own names
NAMED = 5  # sessions named when a prefix fits several, and journals when a folder has several


def opened(path: Path) -> JournalReader:
    """Raises ConfigError when there is no journal at `path`, or a newer release's."""
    if path.is_dir():
        raise ConfigError("JOURNAL", str(path), "it is a folder, and a journal is one file", _within(path))
    if not path.is_file():
        raise ConfigError("JOURNAL", str(path), "there is no such file", WHICH)
    reader = JournalReader(path)
    try:
        reader.stage("")
    except JournalError as error:
        raise ConfigError("JOURNAL", str(path), f"it cannot be read as a journal ({error.reason})", WHICH) from error
    return reader


def _within(folder: Path) -> str:
    """The way out of naming a folder: the journals in it, or just below, by their usual name; else where they are."""
    there = sorted(map(str, [*folder.glob(FILE), *folder.glob(f"*/{FILE}")]))
    if not there:
        return WHICH
    more = f" and {len(there) - NAMED} more" if len(there) > NAMED else ""
    return f"There is {', '.join(there[:NAMED])}{more}"


def found(reader: JournalReader, wanted: str) -> journal.StoredSession:
    """The session of that id, or the only one whose id begins so; raises ConfigError when it is not one."""
    exact = reader.read(wanted)
    if exact is not None:
        return exact
    ids = [known.session_id for known in reader.sessions() if known.session_id.startswith(wanted)]
    if len(ids) > 1:
        more = f" and {len(ids) - NAMED} more" if len(ids) > NAMED else ""
        way_out = f"Give more of the id: {', '.join(ids[:NAMED])}{more}"
        raise ConfigError("SESSION", wanted, f"{len(ids)} sessions begin so", way_out)
    record = reader.read(ids[0]) if ids else None
    if record is None:
        way_out = f"`seamless-verl trajectories ls {reader.path}` lists those there are"
        raise ConfigError("SESSION", wanted, "no session's id is this or begins so", way_out)
    return record


def rebuilt(recorded: journal.StoredSession) -> SessionRecord:
    """The session's record; a call without an end is a cancelled turn in it."""
    session = SessionRecord(recorded.uid, recorded.session_id)
    for call in recorded.calls:
        session.add_turn(call.turn())
    for name, value in recorded.rewards.items():
        session.post_reward(value, name)
    if recorded.stage is not Stage.OPEN:
        session.close(_closed(recorded.reason))
    return session


def _closed(reason: str | None) -> Closed:
    if reason == LIFETIME_OVER:
        return Closed.EXPIRED
    return Closed(reason) if reason in set(Closed) else Closed.FINISHED


def newest_version(recorded: journal.StoredSession) -> int:
    """Of the weights that generated something in the session; 0 where nothing was generated."""
    return max((segment.version for call in recorded.calls for segment in call.segments), default=0)


def parsed_policy(text: str) -> TokenPolicy:
    """The policy that `NAME` or `NAME:k` says; raises ConfigError with the way out."""
    name, colon, bound = text.partition(":")
    if not colon:
        return policy(name)
    if not bound.isdecimal():
        way_out = "Give a whole number of versions, 0 or more, as in mask_older_than:1"
        raise ConfigError("--policy", text, f"{bound!r} is no bound", way_out)
    made = policy(name, int(bound))
    if "policy/max_staleness" not in made.metrics():
        raise ConfigError("--policy", text, f"{name} takes no bound", f"Give {name} alone, or a policy with a bound")
    return made
