"""A piece of shared memory is left behind when it has a name and nobody has it mapped."""

from __future__ import annotations

import multiprocessing

import pytest
from support.shared_memory import FOLDER, abandoned, check_nothing_left, pieces

pytestmark = pytest.mark.integration


def test_a_semaphore_that_a_process_holds_is_not_abandoned() -> None:
    before = pieces()
    lock = multiprocessing.get_context("spawn").Lock()
    (name,) = [one for one in pieces() - before if one == f"sem.{lock._semlock.name.lstrip('/')}"]
    assert abandoned({name}) == set()
    del lock


def test_a_file_that_nobody_has_mapped_is_named() -> None:
    before, left = pieces(), FOLDER / "seamless-test-left"
    left.touch()
    try:
        with pytest.raises(AssertionError, match=left.name):
            check_nothing_left(before, timeout_s=0)
    finally:
        left.unlink()
