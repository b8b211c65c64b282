"""Prints tables as plain text: one printer for all commands and benches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

GAP = "  "  # between two columns


def text_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, align: str = "<") -> str:
    """The header and the rows as lines of equally wide columns, without a line break at the end.

    `align` has `<` (flush left) or `>` (flush right) for each column; the last character holds for all further
    columns, so that `<>` sets the first column left and the others right. Spaces at the end of a line are left out.

    Raises:
        ValueError: a row has more or fewer cells than the header, or `align` is empty or has another character.
    """
    lines = [header, *rows]
    for line in lines:
        if len(line) != len(header):
            raise ValueError(f"row={line!r}: has {len(line)} cells, and the header {len(header)}: give as many")
    if not align or set(align) - set("<>"):
        raise ValueError(f"align={align!r}: give < or > for each column")
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    alignment = align.ljust(len(header), align[-1])
    return "\n".join(
        GAP.join(f"{cell:{side}{width}}" for cell, side, width in zip(line, alignment, widths, strict=False)).rstrip()
        for line in lines
    )
