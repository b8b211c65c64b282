"""`trajectories` tells what a run did with each session: its limits, its masks, and what became of its group."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.cli import Capture, output_lines
from support.journal import call_ended, call_started, chunk_appended, open_journal, write

from seamless_verl.journal import (
    GroupDecided,
    GroupOutcome,
    HandedOver,
    HandOverBegun,
    SessionClosed,
    SessionOpened,
    SqliteJournal,
)

NOTE = {"kept": True, "rewards": {"reward": 0.5, "acc": 1.0}}


def write_session(
    journal: SqliteJournal, uid: str, note: dict[str, Any], *, limit: int | None = None, validation: bool = False
) -> None:
    """A session of four tokens: two of version 0, two of version 3, after a prompt of three."""
    metadata = {"session": "0", "validation": True} if validation else {"session": "0"}
    name = f"s-{uid}"
    write(journal, SessionOpened(name, uid, {"metadata": metadata}, 1.5), call_started(name, uid))
    write(journal, chunk_appended([4, 5], uid), chunk_appended([6, 7], uid, version=3), call_ended(uid))
    write(journal, SessionClosed(name, "finished"), HandOverBegun(name, {"limits": {"max_sequence": limit}}))
    write(journal, HandedOver(name, 9.0, note))


@pytest.fixture
def run_of(tmp_path: Path) -> str:
    with open_journal(tmp_path) as journal:
        write_session(journal, "trained", NOTE)
        write_session(journal, "masked", NOTE)
        write_session(journal, "long", NOTE, limit=6)
        write_session(journal, "stale", NOTE)
        write_session(journal, "again", NOTE)
        write_session(journal, "queued", NOTE)
        write_session(journal, "validated", NOTE, validation=True)
        write_session(journal, "few", {"kept": False, "reason": "too few sessions"})
        fresh = {"policy": "mask_older_than:1", "version": 3}
        write(
            journal,
            GroupDecided("again", GroupOutcome.STALE, 2),
            GroupDecided("trained", GroupOutcome.TRAINED, 4, {"policy": "train_all", "version": 3}),
            GroupDecided("masked", GroupOutcome.TRAINED, 4, fresh),
            GroupDecided("long", GroupOutcome.TRAINED, 5, {"policy": "train_all", "version": 3}),
            GroupDecided("stale", GroupOutcome.STALE, 4),
            GroupDecided("again", GroupOutcome.TRAINED, 5, fresh),  # after a resume
            GroupDecided("unknown", GroupOutcome.TRAINED, 5),
        )
        return str(journal.path)


def test_ls_has_the_outcome_of_each_session(run_of: str, capsys: Capture) -> None:
    lines = output_lines(capsys, "ls", run_of)
    outcomes = {line.split()[1]: line[: line.index("1970")].split()[4:-2] for line in lines[1:9]}
    assert {uid: " ".join(words) for uid, words in outcomes.items()} == {
        "trained": "step 4",
        "masked": "step 4",
        "long": "step 5",
        "stale": "stale",
        "again": "step 5",
        "queued": "queued",
        "validated": "validation",
        "few": "dropped",
    }
    assert lines[9] == (
        "8 sessions (8 handed), 1 dropped, 1 queued, 1 stale, 4 trained, 1 validation: 8 calls, 32 tokens generated"
    )


def test_the_export_counts_what_the_run_trained(run_of: str, capsys: Capture, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    account = output_lines(capsys, "export", run_of, "--out", str(out))[1]
    # trained 4; masked and again 2 each, by the policy of their step; long 3, by its limit
    reasons = "4 stale, 1 too_long, 4 session, 4 group, 4 validation"
    assert account == f"account: 28 generated = 11 trained + 17 dropped ({reasons}); 4 of 4 more wait to be trained"
    found = {row["uid"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert {uid: (row["outcome"], row["step"], row["validation"]) for uid, row in found.items()} == {
        "trained": ("step 4", 4, False),
        "masked": ("step 4", 4, False),
        "long": ("step 5", 5, False),
        "stale": ("stale", -1, False),
        "again": ("step 5", 5, False),
        "queued": ("queued", -1, False),
        "validated": ("validation", -1, True),
        "few": ("dropped", -1, False),
    }
    assert found["masked"]["response_mask"] == [0, 0, 1, 1] and found["long"]["response_ids"] == [4, 5, 6]
    assert dict(zip(found["trained"]["reward_names"], found["trained"]["reward_values"], strict=True)) == {
        "reward": 0.5,
        "acc": 1.0,
    }


def test_show_has_the_limits_the_outcome_and_the_reason(run_of: str, capsys: Capture) -> None:
    text = "\n".join(output_lines(capsys, "show", run_of, "s-long"))
    assert "trained 1/2 too_long" in text and "outcome: step 5\nlimits: max_sequence=6" in text
    assert "rewards: reward=0.5, acc=1.0" in text
    assert text.endswith("account: 4 generated = 3 trained + 1 dropped (1 too_long), by train_all at version 3")
    text = "\n".join(output_lines(capsys, "show", run_of, "s-masked"))
    assert text.endswith("(2 stale), by mask_older_than:1 at version 3")
    text = "\n".join(output_lines(capsys, "show", run_of, "s-masked", "--policy", "train_all"))
    assert text.endswith("4 trained + 0 dropped, by train_all at version 3")
    text = "\n".join(output_lines(capsys, "show", run_of, "s-few"))
    assert "outcome: dropped (too few sessions)" in text and "0 trained + 4 dropped (4 session)" in text


def test_a_deferred_group_is_no_trained_one(tmp_path: Path, capsys: Capture) -> None:
    """Whether its sessions had all ended when its step had enough, or were stopped for that."""
    with open_journal(tmp_path) as journal:
        write_session(journal, "whole", NOTE)
        stopped = {"kept": False, "dropped": "deferred", "reason": "its step had enough groups"}
        write_session(journal, "stopped", stopped)
        decided = [GroupDecided(uid, GroupOutcome.DEFERRED, 4) for uid in ("whole", "stopped")]
        write(journal, *decided)
        path = str(journal.path)
    assert output_lines(capsys, "ls", path)[-1].startswith("2 sessions (2 handed), 1 deferred, 1 dropped")
    for name in ("s-whole", "s-stopped"):
        text = "\n".join(output_lines(capsys, "show", path, name))
        assert "4 generated = 0 trained + 4 dropped (4 deferred)" in text, text


@pytest.mark.parametrize(("reason", "dropped"), [("runner_lost", "runner_lost"), ("abandoned", "session")])
def test_a_session_that_was_never_handed_over_was_not_trained_with_its_group(
    tmp_path: Path, capsys: Capture, reason: str, dropped: str
) -> None:
    with open_journal(tmp_path) as journal:
        write_session(journal, "u", NOTE)
        write(journal, SessionOpened("killed", "u", {"metadata": {}}, 1.5), call_started("killed", "c"))
        write(journal, chunk_appended([4, 5], "c"), call_ended("c"), SessionClosed("killed", reason))
        write(journal, GroupDecided("u", GroupOutcome.TRAINED, 4, {"policy": "train_all", "version": 3}))
    account = output_lines(capsys, "export", str(journal.path), "--out", str(tmp_path / "rows.jsonl"))[1]
    assert account == f"account: 6 generated = 4 trained + 2 dropped (2 {dropped})"


@pytest.mark.parametrize(
    ("pivot", "account"), [("0", "0 trained + 4 dropped (4 pivot)"), ("1", "4 trained + 0 dropped")]
)
def test_the_pivot_of_a_trained_group_was_not_trained(
    tmp_path: Path, capsys: Capture, pivot: str, account: str
) -> None:
    with open_journal(tmp_path) as journal:
        write_session(journal, "u", NOTE)
        details = {"policy": "train_all", "version": 3, "pivot": pivot}
        write(journal, GroupDecided("u", GroupOutcome.TRAINED, 4, details))
    printed = output_lines(capsys, "export", str(journal.path), "--out", str(tmp_path / "rows.jsonl"))[1]
    assert printed == f"account: 4 generated = {account}"


async def test_outcomes_are_deleted_with_the_last_session_of_their_prompt(run_of: str) -> None:
    import sqlite3

    with SqliteJournal(Path(run_of)) as journal:
        await journal.compact(before=8.0)
        assert sqlite3.connect(run_of).execute("SELECT COUNT(*) FROM group_outcomes").fetchone() == (6,)
        await journal.compact(before=10.0)
        assert sqlite3.connect(run_of).execute("SELECT COUNT(*) FROM group_outcomes").fetchone() == (0,)
