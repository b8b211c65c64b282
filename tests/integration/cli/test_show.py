"""`trajectories show --text` with a model's tokenizer, and with a folder that has none."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.cli import Capture, error_line, journal_file, output_lines
from support.journal import call_ended, call_started, chunk_appended, open_journal, session_opened, write

from seamless_verl.tiny import make_tokenizer
from seamless_verl.tiny.tokenizer import END_OF_TURN, token_id

pytestmark = pytest.mark.integration


def test_a_model_without_a_tokenizer(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "model").mkdir()
    message = error_line(capsys, "show", journal_file(tmp_path), "aaa1", "--text", "--model", str(tmp_path / "model"))
    assert f"--model='{tmp_path / 'model'}': it has no tokenizer" in message


def test_a_tokenizer_that_was_not_downloaded(tmp_path: Path, capsys: Capture) -> None:
    """A clone without git-lfs has files that name those which it left out."""
    make_tokenizer().save_pretrained(tmp_path / "model")
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 7031645\n"
    (tmp_path / "model" / "tokenizer.json").write_text(pointer)
    message = error_line(capsys, "show", journal_file(tmp_path), "aaa1", "--text", "--model", str(tmp_path / "model"))
    assert f"--model='{tmp_path / 'model'}': it has no tokenizer" in message and "git lfs pull" in message


def test_show_with_text(tmp_path: Path, capsys: Capture) -> None:
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    with open_journal(tmp_path) as journal:
        asked, answered = tokenizer.encode("2+2?\n"), tokenizer.encode("four\x1b[2J")
        write(
            journal,
            session_opened(),
            call_started(prompt=asked),
            chunk_appended(answered),
            call_ended(),
            call_started("s", "d", [*asked, 65]),
        )
        path = str(journal.path)
    lines = output_lines(capsys, "show", path, "s", "--text", "--model", str(tmp_path / "model"))
    assert "    | 2+2?" in lines and r"    | four\x1b[2J" in lines
    again = lines[lines.index("turn d (cancelled): read 6 tokens, 1 of them new, wrote 0") :]
    assert again[2] == f"    | {tokenizer.decode([65])}"


def test_the_tokenizer_makes_the_cause_certain(tmp_path: Path, capsys: Capture) -> None:
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    marker = token_id(END_OF_TURN)
    spelled = tokenizer.encode(END_OF_TURN, split_special_tokens=True)
    assert marker not in spelled
    with open_journal(tmp_path) as journal:
        write(journal, session_opened(), call_started(), chunk_appended([66, marker]), call_ended())
        write(journal, call_started("s", "d", [1, 2, 3, 66, *spelled]), chunk_appended([7], "d"), call_ended("d"))
        path = str(journal.path)
    assert any("at token 4 (agent_edit)" in line for line in output_lines(capsys, "show", path, "s"))
    lines = output_lines(capsys, "show", path, "s", "--text", "--model", str(tmp_path / "model"))
    assert any("at token 4 (retokenization)" in line for line in lines)
    at = lines.index("drift of d at token 4, recorded:")
    assert lines[at + 1 : at + 4] == [f"    | {END_OF_TURN}", "replayed:", f"    | {END_OF_TURN}"]
