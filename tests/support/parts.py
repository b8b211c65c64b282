"""Parts of the tests: `--part K/N` is every Nth file, beginning with the Kth."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path


def part(text: str) -> tuple[int, int]:
    """`(K, N)` of "K/N". Raises ValueError, which argparse reports with the option and the value."""
    first, parts = (int(number) for number in text.split("/"))
    if not 1 <= first <= parts:
        raise ValueError(text)
    return first, parts


def files_of(files: Collection[Path], first: int, parts: int) -> set[Path]:
    """The files of one part; the parts together are all of them, each once."""
    return set(sorted(files)[first - 1 :: parts])
