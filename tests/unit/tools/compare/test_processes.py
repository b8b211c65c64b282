"""Which signals end the run that is being made."""

from __future__ import annotations

import signal

import pytest

from seamless_verl.tools.compare.processes import handled


@pytest.mark.parametrize("ignored", [False, True])
def test_a_closed_terminal_ends_a_run_unless_nohup_is_before_it(ignored: bool) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        assert set(handled()) == {signal.SIGTERM, signal.SIGINT} | (set() if ignored else {signal.SIGHUP})
    finally:
        signal.signal(signal.SIGHUP, before)
