"""Calls of lost sessions are given again, but none of weights that were gone for any session in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.journal import open_journal, write

from seamless_verl.data_plane.lost_sessions import LostSessions
from seamless_verl.gateway.calls import ASKED, SessionCall
from seamless_verl.journal import CallEnded, CallStarted, ChunkAppended, SessionOpened, SqliteJournal
from seamless_verl.trajectory.images import GATEWAY_KEY
from seamless_verl.trajectory.records import Finish, TokenChunk, logprobs, tokens

OPENING = {"uid": "u", "metadata": {"session": "0", "step": 8}}


def write_session(journal: SqliteJournal, name: str, metadata: dict[str, Any], **calls: int) -> None:
    """A session with a call for each name, of the version that is given for it."""
    write(journal, SessionOpened(name, "u", {"metadata": metadata}, 1.0))
    for asked, version in calls.items():
        call_id = f"{asked} of {name}"
        chunk = TokenChunk(tokens([5]), logprobs([-0.5]), version, "r0")
        started = CallStarted(name, call_id, "", tokens([1]), {GATEWAY_KEY: {ASKED: asked}})
        write(journal, started, ChunkAppended(call_id, chunk), CallEnded(call_id, Finish.STOP))


@pytest.mark.parametrize("stops", [True, False], ids=["stops of the run", "deaths of a worker"])
async def test_weights_that_were_gone_stay_gone(tmp_path: Path, stops: bool) -> None:
    """The first session has tokens of version 9, the run goes on from 7, and reaches 9 again before the next stop."""
    with open_journal(tmp_path) as journal:
        write_session(journal, "first", OPENING["metadata"], old=7, gone=9)  # type: ignore[arg-type]
        lost = LostSessions(journal)
        lost.add("first", "u", OPENING, 7 if stops else None)
        metadata, calls = await lost.take(OPENING)
        assert calls is not None and len(calls) == (1 if stops else 2)
        assert metadata["again"] == {"of": "first", "times": 1} | ({"newest": 7} if stops else {})
        write_session(journal, "second", metadata, own=9)
        later = LostSessions(journal)
        later.add("second", "u", {"metadata": metadata}, 9)
        _, calls = await later.take(OPENING)
        assert calls is not None
        given = {name for name in ("old", "gone", "own") if calls.take(SessionCall("new", tokens([1]), {}, asked=name))}
        assert given == ({"old", "own"} if stops else {"old", "gone", "own"})
