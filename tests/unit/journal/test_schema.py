"""The file format, spelled out: a journal of version 1, which an earlier release wrote, is read and continued, and new
ones are written as version 2, which has one more column.

Nothing here is imported from the schema. If a test fails, the format has changed: then give it a new version, keep
reading the old one, and leave these tests as they are.
"""

from __future__ import annotations

import sqlite3
from array import array
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from seamless_verl.journal import (
    CallEnded,
    CallStarted,
    ChunkAppended,
    Event,
    HandedOver,
    HandOverBegun,
    JournalReader,
    OutsideEvent,
    RequestRefused,
    RewardPosted,
    SessionClosed,
    SessionOpened,
    SqliteJournal,
    Stage,
    StoredCall,
    StoredSession,
)
from seamless_verl.trajectory.records import Finish, Segment, TokenChunk, logprobs, tokens

VERSION_1 = """
PRAGMA application_id=1397049932;
PRAGMA user_version=1;
CREATE TABLE sessions (n INTEGER PRIMARY KEY, session_id TEXT UNIQUE, uid TEXT, settings BLOB, opened_at REAL);
CREATE TABLE calls (n INTEGER PRIMARY KEY, session INTEGER, call_id TEXT, digest TEXT, base INTEGER, base_len INTEGER,
 request_base INTEGER, request_len INTEGER, suffix BLOB, request BLOB);
CREATE TABLE replicas (n INTEGER PRIMARY KEY, name TEXT);
CREATE TABLE deltas (n INTEGER PRIMARY KEY, call INTEGER, version INTEGER, replica INTEGER, ids BLOB, logprobs BLOB);
CREATE TABLE endings (call INTEGER PRIMARY KEY, finish TEXT, reply BLOB);
CREATE TABLE rewards (n INTEGER PRIMARY KEY, session INTEGER, name TEXT, value REAL);
CREATE TABLE stages (session INTEGER, stage INTEGER, note TEXT, at REAL, PRIMARY KEY (session, stage));
CREATE INDEX calls_by ON calls (session);
CREATE INDEX deltas_by ON deltas (call);
CREATE INDEX rewards_by ON rewards (session);
CREATE INDEX stages_by ON stages (stage, at);
"""
ADDED = "outside_events"  # by a later release, without another version: earlier ones ignore it

PROMPT = [*range(256)]  # 1024 bytes, the smallest part of a sequence that a later call refers to
LATER = [*PROMPT, 7, 8, 9, 10]
TEXT = "é" * 600
FIRST_REQUEST = b'{"model":"m","messages":[{"role":"user","content":"' + TEXT.encode() + b'"}]}'
SECOND_REQUEST = FIRST_REQUEST[:-2] + b',{"role":"assistant","content":"2"}]}'


def int32(*values: int) -> bytes:
    return b"".join(value.to_bytes(4, "little", signed=True) for value in values)


# IEEE 754 single precision, little endian
MINUS_HALF, MINUS_1, MINUS_2 = b"\x00\x00\x00\xbf", b"\x00\x00\x80\xbf", b"\x00\x00\x00\xc0"

ROWS: dict[str, list[tuple[Any, ...]]] = {
    "sessions": [
        (1, "open", "u0", b'{"model":"m"}', 1.5),
        (2, "closed", "u1", b"{}", 2.5),
        (3, "handing", "u1", b"{}", 3.5),
        (4, "handed", "u2", b"{}", 4.5),
    ],
    "calls": [
        (1, 1, "c1", "d1", None, 0, None, 0, int32(*PROMPT), FIRST_REQUEST),
        (2, 1, "c2", "d2", 1, 1024, 1, 1024, int32(7, 8, 9, 10), SECOND_REQUEST[1024:]),
        (3, 2, "c3", "d3", None, 0, None, 0, int32(1), b"{}"),
        (4, 4, "c4", "d4", None, 0, None, 0, int32(1, 2), b"{}"),
    ],
    "replicas": [(1, "r0"), (2, "r1")],
    "deltas": [
        (1, 1, 3, 1, int32(7, 8), MINUS_HALF + MINUS_1),
        (2, 1, 3, 1, int32(9), MINUS_2),
        (3, 1, 4, 2, int32(150_000), MINUS_HALF),
        (4, 2, 4, 2, int32(11), MINUS_1),
        (5, 4, 0, 1, int32(5), MINUS_2),
    ],
    "endings": [(1, "tool_calls", b'{"content":"\xc3\xa9"}'), (4, "stop", b"{}")],
    "rewards": [(1, 2, "score", 0.25), (2, 2, "score", 0.75), (3, 2, "style", -1.0)],
    "stages": [
        (2, 1, "finished", 5.5),
        (3, 1, "failed", 6.5),
        (3, 2, None, 7.5),
        (4, 1, "its lifetime is over", 8.5),
        (4, 2, None, 9.5),
        (4, 3, None, 10.5),
    ],
}


def request(*contents: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {
        "model": "m",
        "messages": [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)],
    }


def segment(ids: list[int], values: list[float], version: int, replica: str) -> Segment:
    return Segment(tokens(ids), logprobs(values), version, replica)


C1 = StoredCall(
    "c1",
    "d1",
    tokens(PROMPT),
    (segment([7, 8, 9], [-0.5, -1, -2], 3, "r0"), segment([150_000], [-0.5], 4, "r1")),
    Finish.TOOL_CALLS,
    request(TEXT),
    {"content": "é"},
)
C2 = StoredCall("c2", "d2", tokens(LATER), (segment([11], [-1], 4, "r1"),), None, request(TEXT, "2"), {})
C3 = StoredCall("c3", "d3", tokens([1]), (), None, {}, {})
C4 = StoredCall("c4", "d4", tokens([1, 2]), (segment([5], [-2], 0, "r0"),), Finish.STOP, {}, {})
SESSIONS = (
    StoredSession("open", "u0", {"model": "m"}, 1.5, Stage.OPEN, None, (C1, C2), {}),
    StoredSession("closed", "u1", {}, 2.5, Stage.CLOSED, "finished", (C3,), {"score": 0.75, "style": -1.0}),
    StoredSession("handing", "u1", {}, 3.5, Stage.HANDING, "failed", (), {}),
    StoredSession("handed", "u2", {}, 4.5, Stage.HANDED, "its lifetime is over", (C4,), {}),
)


def chunk(call_id: str, ids: list[int], values: list[float], version: int, replica: str) -> ChunkAppended:
    return ChunkAppended(call_id, TokenChunk(tokens(ids), logprobs(values), version, replica))


EVENTS: list[Event] = [
    SessionOpened("open", "u0", {"model": "m"}, 1.5),
    SessionOpened("closed", "u1", {}, 2.5),
    SessionOpened("handing", "u1", {}, 3.5),
    SessionOpened("handed", "u2", {}, 4.5),
    CallStarted("open", "c1", "d1", tokens(PROMPT), request(TEXT)),
    chunk("c1", [7, 8], [-0.5, -1], 3, "r0"),
    chunk("c1", [9], [-2], 3, "r0"),
    chunk("c1", [150_000], [-0.5], 4, "r1"),
    CallEnded("c1", Finish.TOOL_CALLS, {"content": "é"}),
    CallStarted("open", "c2", "d2", tokens(LATER), request(TEXT, "2")),
    chunk("c2", [11], [-1], 4, "r1"),
    CallStarted("closed", "c3", "d3", tokens([1])),
    CallStarted("handed", "c4", "d4", tokens([1, 2])),
    chunk("c4", [5], [-2], 0, "r0"),
    CallEnded("c4", Finish.STOP),
    RewardPosted("closed", "score", 0.25),
    RewardPosted("closed", "score", 0.75),
    RewardPosted("closed", "style", -1.0),
    SessionClosed("closed", "finished"),
    SessionClosed("handing", "failed"),
    HandOverBegun("handing"),
    SessionClosed("handed", "its lifetime is over"),
    HandOverBegun("handed"),
    HandedOver("handed", 10.5),
]


@pytest.fixture
def earlier(tmp_path: Path) -> Iterator[Path]:
    """A journal of version 1, written without the package."""
    path = tmp_path / "earlier.sqlite"
    with closing(sqlite3.connect(path)) as db:
        db.executescript(VERSION_1)
        for table, rows in ROWS.items():
            db.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(rows[0]))})", rows)
        db.commit()
    yield path


def test_a_journal_of_version_1_is_read(earlier: Path) -> None:
    reader = JournalReader(earlier)
    assert tuple(reader.read(session.session_id) for session in SESSIONS) == SESSIONS
    assert reader.restore() == SESSIONS[:1]
    assert [(line.stage, line.calls, line.tokens, line.reason) for line in reader.sessions()] == [
        (Stage.OPEN, 2, 5, None),
        (Stage.CLOSED, 1, 0, "finished"),
        (Stage.HANDING, 0, 0, "failed"),
        (Stage.HANDED, 1, 1, "its lifetime is over"),
    ]
    reader.check_integrity()


def test_a_journal_of_version_1_is_continued(earlier: Path) -> None:
    with SqliteJournal(earlier) as journal:
        journal.submit(chunk("c2", [12], [-0.5], 4, "r1"), CallEnded("c2", Finish.STOP)).result(timeout=30)
        journal.submit(HandedOver("handing", 11.5)).result(timeout=30)
        refused = RequestRefused("open", "/v1/messages", 400, "prompt is too long", 7.5)
        journal.submit(refused).result(timeout=30)
        session = journal.read("open")
        assert session is not None and session.refused == (refused,)
        assert journal.stage("handing") is Stage.HANDED
        journal.check_integrity()
    assert session is not None and session.calls[0] == C1
    assert session.calls[1].segments == (segment([11, 12], [-1, -0.5], 4, "r1"),)
    assert session.calls[1].finish is Finish.STOP and session.calls[1].prompt_ids == array("i", LATER)


def test_a_journal_is_written_as_one_of_version_1_that_was_continued(earlier: Path, tmp_path: Path) -> None:
    """The same tables, and for the same events the same rows; only the times of stages are the clock's."""
    SqliteJournal(earlier).close()
    path = tmp_path / "new.sqlite"
    with SqliteJournal(path) as journal:
        journal.submit(*EVENTS).result(timeout=30)
        labelled = TokenChunk(tokens([12, 13]), logprobs([-1, -2]), 4, "r1", grammar=b"\x01\x02")
        journal.submit(ChunkAppended("c2", labelled)).result(timeout=30)
    with closing(sqlite3.connect(path)) as new, closing(sqlite3.connect(earlier)) as old:
        for pragma in ("application_id", "user_version"):
            assert new.execute(f"PRAGMA {pragma}").fetchall() == old.execute(f"PRAGMA {pragma}").fetchall()
        assert _definitions(new) == _definitions(old)
        rows = {table: new.execute(f"SELECT * FROM {table}").fetchall() for table in ROWS}
        assert new.execute("SELECT COUNT(*) FROM group_outcomes").fetchone() == (0,)
    stages = [stage[:3] for stage in rows.pop("stages")]
    assert stages == [stage[:3] for stage in ROWS["stages"]]
    deltas = [*((*row, None) for row in ROWS["deltas"]), (6, 2, 4, 2, int32(12, 13), MINUS_1 + MINUS_2, b"\x01\x02")]
    assert rows == {table: ROWS[table] for table in ROWS if table != "stages"} | {"deltas": deltas}


def test_labels_of_grammars_are_added_to_a_journal_of_version_1(earlier: Path) -> None:
    labelled = TokenChunk(tokens([12]), logprobs([-0.5]), 4, "r1", grammar=b"\x02")
    with SqliteJournal(earlier) as journal:
        journal.submit(ChunkAppended("c2", labelled)).result(timeout=30)
    session = JournalReader(earlier).read("open")
    assert session is not None and session.calls[0] == C1
    (segment,) = session.calls[1].segments
    assert (segment.ids, segment.grammar) == (tokens([11, 12]), b"\x00\x02")


def test_a_journal_of_an_earlier_release_takes_the_events_of_outside(earlier: Path) -> None:
    event = OutsideEvent("refused", "session", {"code": "reward_exists"}, 5.0)
    assert JournalReader(earlier).outside_events() == ()
    with SqliteJournal(earlier) as journal:
        journal.submit(event).result(timeout=30)
    assert JournalReader(earlier).outside_events() == (event,)


def _definitions(db: sqlite3.Connection) -> list[tuple[str, ...]]:
    """Without what the first release of version 1 did not record."""
    query = "SELECT type, name, tbl_name, sql FROM sqlite_master WHERE tbl_name NOT IN (?, ?) ORDER BY type, name"
    found = db.execute(query, ("refused", ADDED))
    return [(*names, " ".join(str(sql).split())) for *names, sql in found]


def test_ended_sessions_of_a_journal_of_version_1(earlier: Path) -> None:
    ended = JournalReader(earlier).ended_sessions()
    assert [(one.session_id, one.stage, one.tokens, one.oldest, one.newest) for one in ended] == [
        ("closed", Stage.CLOSED, 0, None, None),
        ("handing", Stage.HANDING, 0, None, None),
        ("handed", Stage.HANDED, 1, 0, 0),
    ]
    assert all(one.group is None for one in ended)
