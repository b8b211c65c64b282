"""The leases of a run's earlier start, whose runners may still work: an agent loop that has the same place takes one.

A runner outlives the run. It repeats what got no reply until the run is back, at the same address and with the same
key. Its session is open in the journal, and its lease is restored with the data plane. The agent loop of a resumed run
asks for the same place of the same group under another task's name, and gets the task of that lease.

Owned state: the restored leases that no agent loop has asked for, by their place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from seamless_verl.data_plane.earlier_sessions import SAMPLE, STEP, BegunAgain, Place
from seamless_verl.journal import RUN, StoredSession


@dataclass(frozen=True)
class OpenSession:
    """The session of a restored lease: who opened it, where, and what it has generated so far."""

    run: str
    place: Place
    tokens: int
    oldest: int | None
    newest: int | None

    @classmethod
    def of(cls, stored: StoredSession) -> OpenSession:
        metadata = stored.settings.get("metadata", {})
        segments = [segment for call in stored.calls for segment in call.segments]
        versions = [segment.version for segment in segments]
        return cls(
            str(metadata.get(RUN, "")),
            (stored.uid, str(metadata.get(SAMPLE))),
            sum(len(segment.ids) for segment in segments),
            min(versions, default=None),
            max(versions, default=None),
        )

    def refusal(self, run: str, version: int) -> BegunAgain | None:
        """Why a start of this run, which goes on from `version`, cannot go on with it; None if it can."""
        if self.run != run:
            return BegunAgain.RUNNING
        return BegunAgain.NEWER_WEIGHTS if self.newest is not None and self.newest > version else None


class EarlierLeases:
    """Tasks of restored leases, each with its session."""

    def __init__(self) -> None:
        self.tasks: dict[Place, tuple[str, OpenSession]] = {}

    def add(self, task_id: str, session: OpenSession) -> None:
        self.tasks[session.place] = (task_id, session)

    def refuse(self, run: str, version: int) -> list[tuple[str, OpenSession, BegunAgain]]:
        """Takes out those that this start cannot go on with."""
        judged = [(place, *found, found[1].refusal(run, version)) for place, found in self.tasks.items()]
        refused = [(place, task, session, why) for place, task, session, why in judged if why is not None]
        for place, *_ in refused:
            del self.tasks[place]
        return [(task, session, why) for _, task, session, why in refused]

    def take(self, opening: Mapping[str, Any]) -> tuple[str, OpenSession, bool] | None:
        """The task of a lease for this opening of a session, its session, and whether its tokens are too old."""
        metadata = opening.get("metadata", {})
        found = self.tasks.pop((str(opening.get("uid")), str(metadata.get(SAMPLE))), None)
        if found is None:
            return None
        task_id, session = found
        step = metadata.get(STEP)
        return task_id, session, step is not None and session.oldest is not None and session.oldest < step - 1


def open_sessions_of(stored: Sequence[StoredSession]) -> dict[str, OpenSession]:
    """Open sessions by their ids."""
    return {session.session_id: OpenSession.of(session) for session in stored}
