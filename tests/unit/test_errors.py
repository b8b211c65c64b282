"""An error keeps its text, its fields and its kind where Ray carries it to another process."""

from __future__ import annotations

import pickle

import pytest

from seamless_verl.errors import (
    CheckpointError,
    JournalOrderError,
    NoProgressError,
    OutsideApiError,
    ReplicaLostError,
    SeamlessError,
)


class RaisedByRay(RuntimeError, JournalOrderError):
    """As Ray raises another process's error: of that error's class too, and it asks the error for what it lacks."""

    def __init__(self, cause: Exception) -> None:
        self.cause = cause

    def __getattr__(self, name: str) -> object:
        return getattr(self.cause, name)


@pytest.mark.parametrize(
    "error",
    [
        JournalOrderError("s", "c", "text", stage="open"),
        OutsideApiError(429, "slow", "text", retry_after=3.0),
        NoProgressError("generation", 3.0),
        CheckpointError(3, "folder", "text"),
        ReplicaLostError("replica", "text"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_is_pickled_with_all_its_fields(error: SeamlessError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.args, vars(again)) == (type(error), str(error), error.args, vars(error))


def test_a_default_does_not_hide_what_another_process_has_set() -> None:
    assert RaisedByRay(JournalOrderError("s", "c", "text", stage="open")).stage == "open"
