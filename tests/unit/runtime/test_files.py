"""Files that are written whole: text, and JSON lines that a resumed run continues."""

from __future__ import annotations

from pathlib import Path

from seamless_verl.runtime.files import JsonLines, write_atomically


def test_text_replaces_what_was_there_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    for text in ("one", "ünï"):
        write_atomically(tmp_path / "f", text)
        assert (tmp_path / "f").read_text(encoding="utf-8") == text
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_lines_are_appended_and_half_a_line_is_none(tmp_path: Path) -> None:
    file = JsonLines(tmp_path / "new" / "f.jsonl")
    assert file.rows() == file.lines() == []
    file.add({"step": 1, "value": "ü"})
    file.add({"step": 2})
    with file.path.open("a") as partly:
        partly.write('{"step": 3, "va')
    assert file.rows() == [{"step": 1, "value": "ü"}, {"step": 2}]


def test_a_resumed_run_keeps_what_its_checkpoint_has(tmp_path: Path) -> None:
    file = JsonLines(tmp_path / "f.jsonl")
    file.resume_at(1)
    assert not file.path.exists()
    for step in (0, 1, 3, 2):
        file.add({"step": step})
    with file.path.open("a") as partly:
        partly.write('{"step": 2')
    file.resume_at(2)
    assert [row["step"] for row in file.rows()] == [0, 1, 2] and file.path.read_text().endswith("}\n")
    before = file.path.stat().st_ino
    file.resume_at(2)
    assert file.path.stat().st_ino == before, "what is right is not written again"


def test_a_run_from_nothing_keeps_nothing(tmp_path: Path) -> None:
    file = JsonLines(tmp_path / "f.jsonl")
    file.add({"step": 0})
    file.resume_at(0)
    assert file.rows() == [] and file.path.exists()
