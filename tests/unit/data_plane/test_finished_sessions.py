"""What a data plane hands over of a session whose routes training needs."""

from __future__ import annotations

from array import array

import pytest
from support.routes import marks, rows_of

from seamless_verl.data_plane.finished_sessions import NO_ROUTES, HandedNote, SessionAccounts
from seamless_verl.data_plane.settings import SessionSettings
from seamless_verl.trajectory.account import DropReason
from seamless_verl.trajectory.records import TOKEN, Finish, Segment, Turn, logprobs, tokens
from seamless_verl.trajectory.routes import Routes
from seamless_verl.trajectory.session import SessionRecord


def session(routes: Routes | None, of_prompt: Routes | None = None, *, validation: bool = False) -> SessionRecord:
    record = SessionRecord("u", "s", validation=validation)
    segment = Segment(tokens([7, 8]), logprobs([-0.5, -0.5]), 1, "r0", routes=routes)
    record.add_turn(Turn("t", array(TOKEN, [1, 2]), [segment], Finish.STOP, prompt_routes=of_prompt))
    return record


def accounts(*, routes: bool) -> SessionAccounts:
    return SessionAccounts(SessionSettings("model", "journal", "key", routes=routes))


def test_a_session_with_all_its_routes_has_them_in_its_sequence() -> None:
    finished = accounts(routes=True).finished(session(rows_of(7, 8), rows_of(2)), 1)
    (sequence,) = finished.sequences
    assert sequence.routes is not None and marks(sequence.routes) == [2, 7, 8] and not finished.untrained


@pytest.mark.parametrize(("routes", "of_prompt"), [(None, None), (rows_of(7, 8), None), (None, rows_of(2))])
def test_a_session_that_lacks_routes_is_dropped_with_that_reason_and_no_token_is_lost(
    routes: Routes | None, of_prompt: Routes | None
) -> None:
    kept = accounts(routes=True)
    finished = kept.finished(session(routes, of_prompt), 1)
    assert finished.sequences == [] and finished.untrained == NO_ROUTES
    kept.acknowledged("s", False, HandedNote("u", finished.untrained))  # as the agent loop hands it over
    assert (kept.total.generated, kept.total.trained, kept.total.dropped) == (2, 0, {DropReason.SESSION: 2})
    kept.total.check_integrity()


def test_routes_are_not_missed_in_a_validation_nor_where_none_are_replayed() -> None:
    assert accounts(routes=True).finished(session(None, validation=True), 1).sequences
    assert accounts(routes=False).finished(session(None), 1).sequences
