"""Tables as plain text."""

from __future__ import annotations

from seamless_verl.cli.output import text_table

ROWS = [("a", "1", "x"), ("long name", "1000", "")]


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    assert text_table(("name", "n", "more"), ROWS).splitlines() == [
        "name       n     more",
        "a          1     x",
        "long name  1000",
    ]


def test_the_last_alignment_holds_for_all_further_columns() -> None:
    assert text_table(("name", "n", "more"), ROWS, align="<>").splitlines() == [
        "name          n  more",
        "a             1     x",
        "long name  1000",
    ]
    assert text_table(("n", "k", "m"), [("100", "a", "20")], align="><>").splitlines() == ["  n  k   m", "100  a  20"]


def test_a_table_may_have_no_rows() -> None:
    assert text_table(("name", "n"), []) == "name  n"
