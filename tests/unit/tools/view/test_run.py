"""What the page is told of a run, also while the run writes, and of a run that has written nothing yet."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.cli import close_events
from support.journal import call_started, chunk_appended, session_opened, write
from support.view import CUT, JOURNAL, make_run

from seamless_verl.errors import JournalError
from seamless_verl.journal import SqliteJournal
from seamless_verl.runtime.locks import only_writer
from seamless_verl.runtime.step_metrics import FILE as METRICS
from seamless_verl.runtime.step_metrics import StepMetrics
from seamless_verl.tools.view import run as module
from seamless_verl.tools.view.run import RunView
from seamless_verl.tools.view.sessions import Query


def test_a_run_that_has_ended(tmp_path: Path) -> None:
    view = RunView(make_run(tmp_path))
    summary = view.summary()
    assert (
        summary["running"] is False and summary["step"] == 2 and summary["sessions"] == 4 and summary["remarks"] == []
    )
    assert summary["description"] is not None and summary["description"].name == "recipe/seamless"
    assert summary["metrics"]["critic/score/mean"] == 0.5
    assert view.series().steps == [1, 2]
    lanes = view.lanes(10, None)
    assert lanes is not None and lanes["names"] == ["train-0"]
    assert view.groups(Query()).total == 3
    answer = view.session(CUT)
    assert answer["session"]["nodes"] and answer["group"] == {CUT: {"reward": 1.0}} and answer["remarks"] == []
    tokens = view.tokens(CUT, 1, 0, 10, answer["session"]["revision"])
    assert tokens is not None and "".join(tokens["texts"]) == "two plus t"
    assert view.turn_texts(CUT, f"{CUT}.1")["reply"] == {"content": f"reply to {CUT}.1"}


def test_before_anything_is_written(tmp_path: Path) -> None:
    view = RunView(tmp_path / "not yet")
    summary = view.summary()
    assert summary["step"] is None and summary["sessions"] == 0 and len(summary["remarks"]) == 2
    assert view.lanes(10, None) is None and view.series().steps == []
    assert view.sessions(Query()).total == 0
    with pytest.raises(LookupError):
        view.session("s")


def test_after_the_end_nothing_is_awaited(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    view = RunView(folder)
    (folder / JOURNAL).unlink()
    assert view.summary()["remarks"] == [
        "The run has ended, and kept no journal: sessions are on record with seamless.gateway.enabled."
    ]
    (folder / METRICS).unlink()
    assert view.summary()["remarks"][1] == "The run has ended before its first step, or kept no metrics."
    with only_writer(folder):
        assert "yet" in view.summary()["remarks"][0] and "yet" in view.summary()["remarks"][1]


def test_reading_goes_on_while_the_run_writes(tmp_path: Path) -> None:
    view, metrics = RunView(tmp_path), StepMetrics.beside(str(tmp_path))
    assert view.summary()["running"] is False
    with SqliteJournal(tmp_path / JOURNAL) as journal:
        assert view.summary()["running"] is True
        for number in range(8):
            name = f"s{number}"
            write(journal, session_opened(name), call_started(name, name), chunk_appended([1, 2], name))
            first = view.session(name)["session"]
            assert (first["generated"], first["stage"]) == (2, "open")
            write(journal, chunk_appended([3], name, version=1))
            assert view.tokens(name, 1, 0, 9, first["revision"]) is None, "the tree has another revision now"
            second = view.session(name)["session"]
            assert second["generated"] == 3 and view.tokens(name, 1, 0, 9, second["revision"]) is not None
            write(journal, *close_events(name))
            assert view.session(name)["session"]["stage"] == "closed"
            metrics.add(number, {"perf/throughput": 1.0})
            assert view.summary()["step"] == number and view.sessions(Query()).total == number + 1
        journal.check_integrity()


def test_what_has_not_changed_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    view = RunView(make_run(tmp_path))
    revision = view.session(CUT)["session"]["revision"]
    lanes = view.lanes(10, None)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("it was read again")

    for name in ("JournalReader", "JournalIndex", "Trajectory", "read_lanes"):
        monkeypatch.setattr(module, name, refuse)
    assert view.lanes(10, None) == lanes
    assert view.tokens(CUT, 1, 0, 1, revision) is not None
    assert view.session(CUT)["session"]["revision"] == revision
    with pytest.raises(AssertionError, match="read again"):
        view.lanes(11, None)


def test_no_more_than_a_few_trees_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT", 2)
    view = RunView(make_run(tmp_path))
    for name in (CUT, "plain0", "plain1", "plain2", CUT):
        view.session(name)
        assert len(view._trajectories) <= 2
    assert list(view._trajectories) == ["plain2", CUT]


def test_shards_are_shown_together(tmp_path: Path) -> None:
    for shard, name in enumerate(("one", "two")):
        with SqliteJournal(tmp_path / f"trajectories-{shard}.sqlite") as journal:
            write(journal, session_opened(name), call_started(name, name), chunk_appended([shard], name))
    view = RunView(tmp_path)
    assert {one.session_id for one in view.sessions(Query()).rows} == {"one", "two"}
    assert view.session("one")["session"]["generated"] == view.session("two")["session"]["generated"] == 1


def test_a_model_of_the_users_own_takes_the_place_of_the_runs(tmp_path: Path) -> None:
    view = RunView(make_run(tmp_path), model=str(tmp_path / "nowhere"))
    answer = view.session(CUT)
    assert "has no tokenizer.json here. Give a folder with --model" in answer["remarks"][0]
    tokens = view.tokens(CUT, 1, 0, 3, answer["session"]["revision"])
    assert tokens is not None and tokens["texts"] == ["", "", ""] and len(tokens["ids"]) == 3


def test_another_programs_file_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / JOURNAL).write_bytes(b"SQLite format 3\0" + bytes(5000))
    (remark, *_) = [one for one in RunView(tmp_path).summary()["remarks"] if "Sessions cannot be shown" in one]
    assert JOURNAL in remark
    with pytest.raises(JournalError):
        RunView(tmp_path).sessions(Query())
