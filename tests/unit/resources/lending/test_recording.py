"""What a policy saw and decided can be read from a file, and decided again."""

from __future__ import annotations

from pathlib import Path

from support.lending import observe_group_interval, view

from seamless_verl.resources.lending import RecordedPolicy, lending_policy
from seamless_verl.resources.lending.marginal import Marginal
from seamless_verl.tools.simulator.calibration import read_recording


def test_a_recording_is_what_was_seen_and_decided(tmp_path: Path) -> None:
    file = tmp_path / "run" / "lending.jsonl"
    recorded = RecordedPolicy(Marginal(), "marginal", file)
    observe_group_interval(recorded, 0.5)
    seen = [view("BBR", now=60.0, lent=True, running=4, due_in_s=0.0), view("BBR", now=61.0, waiting=9, trained=2)]
    decided = [dict(recorded.decide(shown)) for shown in seen]
    [(name, state, rows)] = read_recording(file)
    assert name == "marginal" and state == Marginal().state_dict()
    assert [row[0] for row in rows[-2:]] == seen and [row[1] for row in rows[-2:]] == decided


def test_each_start_of_a_run_is_decided_again_from_its_own_state(tmp_path: Path) -> None:
    file, state = tmp_path / "lending.jsonl", Marginal().state_dict()
    for start in range(2):
        policy = RecordedPolicy(Marginal(), "marginal", file)
        policy.load_state_dict(state)
        for i in range(20):
            policy.decide(view("BBR", now=20.0 * start + i, finished=i, waiting=i % 3, trained=1, lent=i % 2 == 1))
        state = policy.state_dict()
    starts = list(read_recording(file))
    assert [len(rows) for *_, rows in starts] == [20, 20] and starts[1][1] != starts[0][1]
    for name, found, rows in starts:
        again = lending_policy(name)
        again.load_state_dict(found)
        assert all(again.decide(shown) == decision for shown, decision in rows)
