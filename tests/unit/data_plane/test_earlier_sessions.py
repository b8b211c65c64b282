"""The sessions that a resumed run finds in its journal, by what earlier starts have recorded."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from support.journal import open_journal, write

from seamless_verl.data_plane.earlier_sessions import BegunAgain, EarlierSessions
from seamless_verl.journal import (
    BEGUN,
    CallEnded,
    CallStarted,
    ChunkAppended,
    GroupDecided,
    GroupOutcome,
    HandedOver,
    HandOverBegun,
    OutsideEvent,
    SessionClosed,
    SessionOpened,
    SqliteJournal,
)
from seamless_verl.trajectory.records import Finish, TokenChunk, logprobs, tokens

RUN = "run-a"


def write_session(journal: SqliteJournal, name: str, uid: str, *, version: int, run: str = RUN) -> None:
    """A session that was handed over and kept."""
    chunk = TokenChunk(tokens([1, 2]), logprobs([-0.5, -0.5]), version, "r0")
    write(
        journal,
        SessionOpened(name, uid, {"metadata": {"session": "0", "run": run}}, 1.0),
        CallStarted(name, f"c {name}", f"d {name}", tokens([5])),
        ChunkAppended(f"c {name}", chunk),
        CallEnded(f"c {name}", Finish.STOP),
        SessionClosed(name, "finished"),
        HandOverBegun(name, {"agent": {"status": "finished", "reward": 0.5}}),
        HandedOver(name, 2.0, {"kept": True}),
    )


class Starts:
    """The starts of a run, and the processes of its data plane, over one journal."""

    def __init__(self, journal: SqliteJournal) -> None:
        self.journal, self.ended = journal, list[str]()

    def earlier(self, **more: Any) -> EarlierSessions:
        async def end(session_id: str, *_: Any) -> None:
            self.ended.append(session_id)

        return EarlierSessions(self.journal, end, lambda *_: None, **more)

    async def begin(self, version: int) -> EarlierSessions:
        write(self.journal, OutsideEvent(BEGUN, "", {}, 1.0))
        earlier = self.earlier()
        await earlier.begin(RUN, version)
        return earlier


@contextlib.asynccontextmanager
async def starts(folder: Path) -> AsyncGenerator[Starts, None]:
    with open_journal(folder) as journal:
        yield Starts(journal)


async def test_what_an_abandoned_step_decided_hides_no_session_from_a_later_start(tmp_path: Path) -> None:
    """A start dies in the save of step 20, another one reaches 20 without this group, and a third resumes there."""
    async with starts(tmp_path) as run:
        await run.begin(10)
        write_session(run.journal, "y0", "y", version=10)
        write_session(run.journal, "theirs", "theirs", version=10, run="run-b")
        both = [GroupDecided(uid, GroupOutcome.TRAINED, 20) for uid in ("y", "theirs")]
        write(run.journal, *both)
        assert (await run.begin(10)).uids == {"y"}
        assert (await run.begin(20)).uids == {"y"}, "the outcome is of a branch that is gone"
        write(run.journal, GroupDecided("y", GroupOutcome.TRAINED, 21))
        assert not (await run.begin(21)).uids
        assert [one.outcome for one in run.journal.sessions()] == ["step 21", "step 20"], "another run's stays"


async def test_a_restarted_process_remembers_no_drops_once_its_start_has_begun(tmp_path: Path) -> None:
    async with starts(tmp_path) as run:
        await run.begin(1)
        write_session(run.journal, "s", "u", version=1)
        restarted = run.earlier()
        await restarted.restore()
        restarted.dropping("another")
        await restarted.begin(RUN, 1)  # as Ray repeats it
        assert not restarted.dropped_here and not restarted.begun and restarted.uids == {"u"}
        write(run.journal, OutsideEvent(BEGUN, "", {}, 1.0))  # another start, whose data plane dies before it begins
        later = run.earlier()
        await later.restore()
        later.dropping("another")
        assert later.dropped_here == {"another"}
        await later.begin(RUN, 1)
        assert later.begun and not later.dropped_here


async def test_a_session_whose_routes_are_gone_begins_again_where_they_are_replayed(tmp_path: Path) -> None:
    async with starts(tmp_path) as run:
        await run.begin(1)
        write_session(run.journal, "s", "u", version=1)
        write(run.journal, OutsideEvent(BEGUN, "", {}, 1.0))
        for routes in (False, True):
            earlier = run.earlier(routes=routes)
            await earlier.begin(RUN, 1)
            taken = await earlier.take("u", "0", 1)
            assert (taken is None) == routes
        assert earlier.begun_again[BegunAgain.NO_ROUTES] == 1 and not earlier.taken and not earlier.uids


async def test_a_session_that_was_taken_up_and_dropped_is_not_taken_up_again(tmp_path: Path) -> None:
    """Its tokens would be counted twice. A session of the same place that was kept stays."""
    async with starts(tmp_path) as run:
        await run.begin(1)
        for name, uid in (("s", "u"), ("t", "v")):
            write_session(run.journal, name, uid, version=1)
        earlier = await run.begin(1)
        for uid, kept in (("u", False), ("v", True)):
            taken = await earlier.take(uid, "0", 1)
            assert taken is not None
            earlier.acknowledged(taken.session_id, kept)
        assert await earlier.take("u", "0", 1) is None and earlier.uids == {"v"}
