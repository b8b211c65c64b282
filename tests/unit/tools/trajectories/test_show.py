"""`trajectories ls` and `show` print a journal's sessions."""

from __future__ import annotations

import json
import re
import time
from datetime import datetime
from pathlib import Path

import pytest
from support.cli import Capture, close_events, fill_journal, journal_file, output_lines
from support.journal import open_journal, session_opened, write

from seamless_verl.cli.output import escape, format_age
from seamless_verl.journal import Stage, StoredSession
from seamless_verl.journal.stored import rebuild_record
from seamless_verl.trajectory.records import Finish
from seamless_verl.trajectory.session import Closed


def listed_ids(lines: list[str]) -> list[str]:
    return [line.split()[0] for line in lines[1 : lines.index(totals_line(lines))]]


def totals_line(lines: list[str]) -> str:
    return next(line for line in lines if re.match(r"\d+ sessions?\b", line))


def test_ls_has_a_line_for_each_session_and_the_totals(tmp_path: Path, capsys: Capture) -> None:
    header, first, second, third, totals, no_writer = output_lines(capsys, "ls", journal_file(tmp_path))
    assert header.split() == ["SESSION", "UID", "STAGE", "REASON", "OUTCOME", "CALLS", "TOKENS", "OPENED", "AGE"]
    assert first.split()[:7] == ["aaa1", "u0", "closed", "finished", "-", "3", "6"]
    assert second.split()[:7] == ["aab2", "u1", "open", "-", "-", "1", "1"]
    assert third.split()[:7] == ["b3", "u1", "handed", "failed", "-", "1", "2"]
    at = datetime.fromisoformat(first.split()[7])
    assert at.utcoffset() is not None and at.timestamp() == 1.0
    days = int((time.time() - 1.5) // 86400)
    assert first.split()[8].startswith(f"{days}d")
    assert totals == "3 sessions (1 open, 1 closed, 1 handed): 5 calls, 9 tokens generated"
    assert no_writer.startswith("No run writes this journal now. What is open was cut off with its run")


def test_ls_reports_sessions_that_a_stopped_run_left_open(tmp_path: Path, capsys: Capture) -> None:
    with open_journal(tmp_path) as journal:
        write(journal, session_opened("running"))
        path = str(journal.path)
        assert output_lines(capsys, "ls", path)[-1].startswith("1 session (1 open)"), "its run goes on"
    assert output_lines(capsys, "ls", path)[-1].startswith("No run writes this journal now")
    Path(f"{path}-lock").unlink()  # as of a copy
    assert output_lines(capsys, "ls", path)[-1].startswith("No run writes this journal now")
    with open_journal(tmp_path) as journal:
        write(journal, *close_events("running", "abandoned"))
    assert output_lines(capsys, "ls", path)[-1].startswith("1 session (1 closed)")


def test_ls_leaves_out_what_was_not_asked_for(tmp_path: Path, capsys: Capture) -> None:
    path = journal_file(tmp_path)
    assert listed_ids(output_lines(capsys, "ls", path, "--uid", "u1")) == ["aab2", "b3"]
    assert listed_ids(output_lines(capsys, "ls", path, "--stage", "closed")) == ["aaa1"]
    limited = output_lines(capsys, "ls", path, "--limit", "2")
    assert listed_ids(limited) == ["aab2", "b3"]
    assert totals_line(limited).startswith("3 sessions") and "the newest 2 listed" in totals_line(limited)
    assert output_lines(capsys, "ls", path, "--uid", "nobody")[1:] == ["0 sessions: 0 calls, 0 tokens generated"]


def test_ls_as_json_has_an_object_a_line(tmp_path: Path, capsys: Capture) -> None:
    read = [json.loads(line) for line in output_lines(capsys, "ls", journal_file(tmp_path), "--json")]
    assert [entry["session_id"] for entry in read] == ["aaa1", "aab2", "b3"]
    assert (read[0]["stage"], read[0]["tokens"], read[0]["opened_at"]) == ("closed", 6, 1.5)
    assert read[1]["reason"] is None and abs(read[0]["age_s"] - time.time()) < 60


def test_show_prints_what_is_trained_and_what_drifted(tmp_path: Path, capsys: Capture) -> None:
    path = journal_file(tmp_path)
    lines = output_lines(capsys, "show", path, "aaa1", "--policy", "mask_older_than:0")
    assert lines[0] == "session u0/aaa1 finished reward=0.3: 3 turns, 6 tokens generated"
    assert "context 3" in lines
    assert any(line.startswith("stage: closed (finished), opened 19") for line in lines)
    assert any("by aaa1-c1 v1 on r0: trained 0/1 stale" in line for line in lines)
    assert any("by aaa1-c3 v2 on r0: trained 2/2  => sequence aaa1-c3" in line for line in lines)
    (drift,) = (line for line in lines if line.startswith("drift: "))
    assert "aaa1-c3 left aaa1-c2 at token 4 (agent_edit): 3 generated tokens no longer" in drift
    assert "rewards: reward=0.30000000000000004" in lines
    assert "weight versions: v0 2 tokens, v1 2 tokens, v2 2 tokens" in lines
    assert lines[-1] == "account: 6 generated = 2 trained + 4 dropped (4 stale), by mask_older_than:0 at version 2"


def test_show_trains_everything_by_default(tmp_path: Path, capsys: Capture) -> None:
    path = journal_file(tmp_path)
    assert output_lines(capsys, "show", path, "aaa1")[-1].startswith("account: 6 generated = 6 trained + 0 dropped, by")
    last = output_lines(capsys, "show", path, "aaa1", "--policy", "mask_older_than:1", "--version", "3")[-1]
    assert last == "account: 6 generated = 2 trained + 4 dropped (4 stale), by mask_older_than:1 at version 3"


def test_show_takes_the_beginning_of_an_id_and_names_calls_without_an_end(tmp_path: Path, capsys: Capture) -> None:
    lines = output_lines(capsys, "show", journal_file(tmp_path), "aab")
    assert lines[0].startswith("session u1/aab2 open: 1 turns, 1 tokens")
    assert any(line.startswith("without an end: aab2-c1 ") for line in lines)
    assert "1 generated = 0 trained + 1 dropped (1 cancelled)" in lines[-1]


def test_a_whole_id_is_never_ambiguous(tmp_path: Path, capsys: Capture) -> None:
    with open_journal(tmp_path) as journal:
        write(journal, session_opened("a", "first"), session_opened("ab", "second"))
        assert output_lines(capsys, "show", str(journal.path), "a")[0].startswith("session first/a ")


def test_show_with_requests(tmp_path: Path, capsys: Capture) -> None:
    lines = output_lines(capsys, "show", journal_file(tmp_path), "aaa1", "--request")
    assert any('"content": "reply to aaa1-c2"' in line for line in lines)
    assert sum('"messages": [' in line for line in lines) == 3
    assert "turn aaa1-c2 (stop): read 7 tokens, 1 of them new, wrote 1" in lines


@pytest.mark.parametrize("reason", [*Closed, "the agent returned"])
def test_a_session_is_closed_as_its_reason_says(reason: str) -> None:
    recorded = StoredSession("s", "u", {}, 0.0, Stage.CLOSED, str(reason), (), {})
    assert rebuild_record(recorded, all_calls=True).closed == (reason if reason in set(Closed) else Closed.FINISHED)


def test_a_call_that_runs_is_in_what_is_shown_alone(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        fill_journal(journal)
        stored = journal.read("aab2")
    assert stored is not None and rebuild_record(stored).turns == []
    assert [turn.finish for turn in rebuild_record(stored, all_calls=True).turns] == [Finish.CANCELLED]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-3, "0s"), (5.9, "5s"), (185, "3m05s"), (7380, "2h03m"), (86400 * 4 + 7 * 3600, "4d07h"), (60, "1m00s")],
)
def test_ages(seconds: float, text: str) -> None:
    assert format_age(seconds) == text


def test_nothing_steers_the_terminal() -> None:
    assert escape("a\x1b[31m\u202eb\nc\ud800é") == r"a\x1b[31m\u202eb\nc\ud800é"
    assert re.fullmatch(r"\t\n", escape("\t\n", "\t\n"))
