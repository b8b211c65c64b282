"""`trajectories export` writes rows of closed sessions to a file that is complete or absent."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cli import NOTHING_LEFT_BEHIND, close_events, fill_journal, journal_file, write_drifted_session
from support.journal import call_ended, call_started, chunk_appended, open_journal, session_opened, write
from support.trajectory import segment, session, turn

from seamless_verl.cli.main import main
from seamless_verl.tools.trajectories import export as export_command
from seamless_verl.tools.trajectories.export import ARRAYS, rows, write_jsonl
from seamless_verl.trajectory.images import GATEWAY_KEY, KEY
from seamless_verl.trajectory.policies import MaskOlderThan, TrainAll
from seamless_verl.trajectory.sequences import assemble

Capture = pytest.CaptureFixture[str]


def export_rows(path: str, out: Path, *options: str) -> list[dict[str, Any]]:
    assert main(["trajectories", "export", path, "--out", str(out), *options]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def read_back(kind: str, out: Path) -> list[dict[str, Any]]:
    if kind == "jsonl":
        return [json.loads(line) for line in out.read_text().splitlines()]
    if kind == "parquet":
        import pyarrow.parquet

        return list(pyarrow.parquet.read_table(out).to_pylist())
    import datasets

    return list(datasets.load_from_disk(str(out)))


def test_every_closed_session_is_exported_and_no_open_one(tmp_path: Path, capsys: Capture) -> None:
    read = export_rows(journal_file(tmp_path), tmp_path / "rows.jsonl")
    assert [(row["session_id"], row["leaf_id"], row["closed"]) for row in read] == [
        ("aaa1", "aaa1-c2", "finished"),
        ("aaa1", "aaa1-c3", "finished"),
        ("b3", "b3-c1", "failed"),
    ]
    assert read[0]["response_ids"] == [4, 5, 6, 7, 8] and read[0]["weight_version"] == [0, 0, 1, -1, 1]
    assert (read[0]["reward_names"], read[0]["reward_values"]) == (["reward"], [0.1 + 0.2])
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"3 rows of 2 sessions in {tmp_path / 'rows.jsonl'}, 1 open session left out"
    assert second == "account: 8 generated = 8 trained + 0 dropped"


def test_only_one_prompt_and_only_what_the_policy_trains(tmp_path: Path, capsys: Capture) -> None:
    path = journal_file(tmp_path)
    assert [row["uid"] for row in export_rows(path, tmp_path / "rows.jsonl", "--uid", "u1")] == ["u1"]
    assert "1 open session left out" in capsys.readouterr().out
    newest = export_rows(path, tmp_path / "rows.jsonl", "--policy", "mask_older_than")
    assert [row["leaf_id"] for row in newest] == ["aaa1-c3", "b3-c1"]
    assert "8 generated = 4 trained + 4 dropped (4 stale)" in capsys.readouterr().out
    assert export_rows(path, tmp_path / "rows.jsonl", "--policy", "mask_older_than", "--version", "9") == []


def test_rows_whose_images_are_not_exported_are_counted(tmp_path: Path, capsys: Capture) -> None:
    digest = sha256(b"a picture").hexdigest()
    with open_journal(tmp_path) as journal:
        asked = replace(call_started(), request={GATEWAY_KEY: {KEY: [[1, 1, digest]]}})
        write(journal, session_opened(), asked, chunk_appended([4, 5]), call_ended(), *close_events("s"))
        path = str(journal.path)
    assert len(export_rows(path, tmp_path / "rows.jsonl")) == 1
    said = capsys.readouterr().out.splitlines()[1]
    assert said == "images: 1 row with placeholders alone; the files are in the journal"


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "datasets"])
def test_each_format_gives_the_same_rows_back(tmp_path: Path, kind: str) -> None:
    path, out = journal_file(tmp_path), tmp_path / "out"
    expected = export_rows(path, tmp_path / "rows.jsonl")
    assert main(["trajectories", "export", path, "--out", str(out), "--format", kind]) == 0
    assert read_back(kind, out) == expected
    assert {entry.name for entry in tmp_path.iterdir()} <= {"out", "rows.jsonl"} | NOTHING_LEFT_BEHIND


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "datasets"])
def test_no_rows_are_a_file_of_no_rows(tmp_path: Path, kind: str) -> None:
    with open_journal(tmp_path) as journal:
        write(journal, session_opened())
        path = str(journal.path)
    assert main(["trajectories", "export", path, "--out", str(tmp_path / "out"), "--format", kind]) == 0
    assert read_back(kind, tmp_path / "out") == []


def test_the_tables_types_are_those_of_the_arrays(tmp_path: Path) -> None:
    import pyarrow.parquet

    out = tmp_path / "rows.parquet"
    assert main(["trajectories", "export", journal_file(tmp_path), "--out", str(out), "--format", "parquet"]) == 0
    schema = pyarrow.parquet.read_schema(out)
    record = session(turn("a", [1], [2]))
    columns = list(rows(record, assemble(record, TrainAll(), 0))[0])
    assert schema.names == [*columns, "outcome", "step", "validation"]
    types = {name: str(schema.field(name).type.value_type) for name in ("response_mask", "rollout_log_probs")}
    assert types == {"response_mask": "uint8", "rollout_log_probs": "float"}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_an_earlier_file_stays_until_the_new_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path, out = journal_file(tmp_path), tmp_path / "rows"
    out.write_text("earlier")

    def breaks(*_: object) -> None:
        assert out.read_text() == "earlier"
        raise RuntimeError("in the middle")

    monkeypatch.setattr(export_command, "rows", breaks)
    with pytest.raises(RuntimeError, match="middle"):
        main(["trajectories", "export", path, "--out", str(out), "--format", kind])
    assert out.read_text() == "earlier"
    assert {entry.name for entry in tmp_path.iterdir()} <= {"rows"} | NOTHING_LEFT_BEHIND


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "datasets"])
def test_what_is_no_file_is_not_replaced(tmp_path: Path, capsys: Capture, kind: str) -> None:
    """As /dev/stdout, which is a link, and /dev/null: root could put a file in their place."""
    path, pipe, link = journal_file(tmp_path), tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to("nowhere")
    for out in (pipe, link):
        assert main(["trajectories", "export", path, "--out", str(out), "--format", kind]) == 2
        assert (
            f"--out='{out}': it is a device or a link, which would be replaced. Give a file" in capsys.readouterr().err
        )
    assert pipe.is_fifo() and link.is_symlink()


@pytest.mark.parametrize(("kind", "package"), [("parquet", "pyarrow"), ("datasets", "datasets")])
def test_a_missing_package_is_named(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, kind: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    out = tmp_path / "out"
    assert main(["trajectories", "export", journal_file(tmp_path), "--out", str(out), "--format", kind]) == 2
    message = capsys.readouterr().err
    assert f"--format='{kind}'" in message and f"pip install {package}, or take --format jsonl" in message
    assert not out.exists() and "Traceback" not in message


def test_sessions_that_come_and_close_meanwhile_do_not_disturb(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        fill_journal(journal)
        for number in range(10):
            write_drifted_session(journal, f"more{number}")
            read = export_rows(str(journal.path), tmp_path / "rows.jsonl")
            assert len(read) == 3 + 2 * number
            write(journal, call_started(f"more{number}", "last"), *close_events(f"more{number}"))


def test_rows_come_back_as_the_arrays_they_were(tmp_path: Path) -> None:
    a = turn("a", [1, 1], [segment([2, 3], 4), segment([4], 5, replica="r1")])
    record = session(a, turn("b", [1, 1, 2, 3, 4, 6], [segment([7], 5)]))
    assembly = assemble(record, MaskOlderThan(0), 5)
    assert write_jsonl(tmp_path / "rows.jsonl", rows(record, assembly)) == 1
    (read,), (sequence,) = read_back("jsonl", tmp_path / "rows.jsonl"), assembly.sequences
    for name in ARRAYS:
        array = getattr(sequence, name)
        assert np.array_equal(np.asarray(read[name], array.dtype), array)
    assert read["turn_ids"] == ["a", "b"] and read["span_starts"] == [0, 2, 4] and read["closed"] == ""
    assert all(type(i) is int for i in read["response_ids"])


def test_a_number_that_is_not_finite_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        write_jsonl(tmp_path / "rows.jsonl", [{"ok": 1.0}, {"bad": float("inf")}])
    assert list(tmp_path.iterdir()) == []
