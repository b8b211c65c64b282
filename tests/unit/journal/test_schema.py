"""The file format, spelled out: a journal of version 2 is read and continued, and new ones are written as that.

Nothing here is imported from the schema. If a test fails, the format has changed: then give it a new version, so that
files of the old one are refused.
"""

from __future__ import annotations

import sqlite3
from array import array
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from seamless_verl.errors import ConfigError
from seamless_verl.journal import (
    CallEnded,
    CallStarted,
    ChunkAppended,
    Event,
    HandedOver,
    HandOverBegun,
    JournalReader,
    RequestRefused,
    RewardPosted,
    SessionClosed,
    SessionOpened,
    SqliteJournal,
    Stage,
    StoredCall,
    StoredSession,
)
from seamless_verl.journal.reader import check_file
from seamless_verl.trajectory.records import Finish, Segment, TokenChunk, logprobs, tokens

VERSION_2 = """
PRAGMA application_id=1397049932;
PRAGMA user_version=2;
CREATE TABLE sessions (n INTEGER PRIMARY KEY, session_id TEXT UNIQUE, uid TEXT, settings BLOB, opened_at REAL);
CREATE TABLE calls (n INTEGER PRIMARY KEY, session INTEGER, call_id TEXT, digest TEXT, base INTEGER, base_len INTEGER,
 request_base INTEGER, request_len INTEGER, suffix BLOB, request BLOB);
CREATE TABLE replicas (n INTEGER PRIMARY KEY, name TEXT);
CREATE TABLE deltas (n INTEGER PRIMARY KEY, call INTEGER, version INTEGER, replica INTEGER, ids BLOB, logprobs BLOB,
 grammar BLOB);
CREATE TABLE endings (call INTEGER PRIMARY KEY, finish TEXT, reply BLOB);
CREATE TABLE rewards (n INTEGER PRIMARY KEY, session INTEGER, name TEXT, value REAL);
CREATE TABLE refused (n INTEGER PRIMARY KEY, session INTEGER, path TEXT, status INTEGER, message TEXT, at REAL);
CREATE TABLE stages (session INTEGER, stage INTEGER, note TEXT, at REAL, PRIMARY KEY (session, stage));
CREATE TABLE outside_events (n INTEGER PRIMARY KEY, kind TEXT, subject TEXT, detail BLOB, at REAL);
CREATE TABLE group_outcomes (n INTEGER PRIMARY KEY, uid TEXT, outcome TEXT, step INTEGER, details BLOB, at REAL);
CREATE INDEX sessions_by ON sessions (uid);
CREATE INDEX group_outcomes_by ON group_outcomes (uid);
CREATE INDEX calls_by ON calls (session);
CREATE INDEX deltas_by ON deltas (call);
CREATE INDEX rewards_by ON rewards (session);
CREATE INDEX refused_by ON refused (session);
CREATE INDEX stages_by ON stages (stage, at);
CREATE INDEX outside_events_by ON outside_events (subject, kind);
"""

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
        (1, 1, 3, 1, int32(7, 8), MINUS_HALF + MINUS_1, None),
        (2, 1, 3, 1, int32(9), MINUS_2, None),
        (3, 1, 4, 2, int32(150_000), MINUS_HALF, None),
        (4, 2, 4, 2, int32(11), MINUS_1, None),
        (5, 4, 0, 1, int32(5), MINUS_2, None),
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
def known(tmp_path: Path) -> Path:
    """A journal written without the package."""
    path = tmp_path / "known.sqlite"
    with closing(sqlite3.connect(path)) as db:
        db.executescript(VERSION_2)
        for table, rows in ROWS.items():
            db.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(rows[0]))})", rows)
        db.commit()
    return path


def test_a_journal_of_version_2_is_read(known: Path) -> None:
    reader = JournalReader(known)
    assert tuple(reader.read(session.session_id) for session in SESSIONS) == SESSIONS
    assert reader.restore() == SESSIONS[:1]
    found = [(one.stage, one.calls, one.tokens, one.reason, one.oldest, one.newest) for one in reader.sessions()]
    assert found == [
        (Stage.OPEN, 2, 5, None, 3, 4),
        (Stage.CLOSED, 1, 0, "finished", None, None),
        (Stage.HANDING, 0, 0, "failed", None, None),
        (Stage.HANDED, 1, 1, "its lifetime is over", 0, 0),
    ]
    assert reader.sessions() == tuple(session.summary() for session in SESSIONS)
    reader.check_integrity()


def test_a_journal_of_version_2_is_continued(known: Path) -> None:
    with SqliteJournal(known) as journal:
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


def test_a_journal_is_written_as_the_known_one(known: Path, tmp_path: Path) -> None:
    """The same tables, and for the same events the same rows; only the times of stages are the clock's."""
    path = tmp_path / "new.sqlite"
    with SqliteJournal(path) as journal:
        journal.submit(*EVENTS).result(timeout=30)
        labelled = TokenChunk(tokens([12, 13]), logprobs([-1, -2]), 4, "r1", grammar=b"\x01\x02")
        journal.submit(ChunkAppended("c2", labelled)).result(timeout=30)
    with closing(sqlite3.connect(path)) as new, closing(sqlite3.connect(known)) as old:
        for pragma in ("application_id", "user_version"):
            assert new.execute(f"PRAGMA {pragma}").fetchall() == old.execute(f"PRAGMA {pragma}").fetchall()
        assert _definitions(new) == _definitions(old)
        rows = {table: new.execute(f"SELECT * FROM {table}").fetchall() for table in ROWS}
        assert new.execute("SELECT COUNT(*) FROM group_outcomes").fetchone() == (0,)
    stages = [stage[:3] for stage in rows.pop("stages")]
    assert stages == [stage[:3] for stage in ROWS["stages"]]
    deltas = [*ROWS["deltas"], (6, 2, 4, 2, int32(12, 13), MINUS_1 + MINUS_2, b"\x01\x02")]
    assert rows == {table: ROWS[table] for table in ROWS if table != "stages"} | {"deltas": deltas}
    session = JournalReader(path).read("open")
    assert session is not None and session.calls[1].segments[0].grammar == b"\x00\x01\x02"


@pytest.mark.parametrize("version", [0, 1, 3])
def test_a_journal_of_another_version_is_refused(known: Path, version: int) -> None:
    with closing(sqlite3.connect(known)) as db:
        db.execute(f"PRAGMA user_version={version}")
        db.commit()
    before = known.read_bytes()
    for reads in (SqliteJournal, check_file, JournalReader.sessions):
        with pytest.raises(ConfigError, match=f"its format is {version}, this release knows 2"):
            reads(JournalReader(known) if reads is JournalReader.sessions else known)  # type: ignore[arg-type]
    assert known.read_bytes() == before


def _definitions(db: sqlite3.Connection) -> list[tuple[str, ...]]:
    found = db.execute("SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY type, name")
    return [(*names, " ".join(str(sql).split())) for *names, sql in found]
