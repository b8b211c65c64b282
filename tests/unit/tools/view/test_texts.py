"""The text of each token, also of those that are a part of a character."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.view import ids_of, make_tokenizer

from seamless_verl.tools.view.trajectory import Texts


@pytest.mark.parametrize("text", ["two plus two", "a é 漢字 🙂 end", "\n\t  x", "🙂", ""])
def test_the_pieces_are_the_whole_text(tmp_path: Path, text: str) -> None:
    model = make_tokenizer(tmp_path)
    ids, texts = ids_of(model, text), Texts.load(str(model))
    pieces = texts.pieces(ids)
    assert len(pieces) == len(ids) and "".join(pieces) == text == texts.decode(ids)
    for start in range(len(ids)):
        assert "".join(texts.pieces(ids[start:], ids[:start])).endswith(text[-1]), "of a part, after what is before it"


def test_a_character_is_its_last_tokens(tmp_path: Path) -> None:
    model = make_tokenizer(tmp_path)
    assert Texts.load(str(model)).pieces(ids_of(model, "a🙂b")) == ["a", "", "", "", "🙂", "b"]


def test_what_is_no_character_is_shown_as_such(tmp_path: Path) -> None:
    model = make_tokenizer(tmp_path)
    broken = ids_of(model, "🙂")[:2]
    assert "".join(Texts.load(str(model)).pieces([*broken, *ids_of(model, "abc")])).endswith("abc")


def test_without_a_tokenizer_it_says_why(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    for model, said in (
        (None, "--model"),
        (str(tmp_path), "cannot be read"),
        ("nobody/nothing", "has no tokenizer.json"),
    ):
        texts = Texts.load(model)
        assert said in texts.missing and texts.pieces([1, 2]) == ["", ""] and texts.decode([1]) == ""
