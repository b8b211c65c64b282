"""No test file is in two parts, and none is in no part."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.parts import files_of, part


@pytest.mark.parametrize("parts", [1, 2, 4, 7, 20])
def test_the_parts_are_all_files_each_once(parts: int) -> None:
    files = [Path(f"tests/test_{number}.py") for number in range(13)]
    found = [path for first in range(1, parts + 1) for path in files_of(files, *part(f"{first}/{parts}"))]
    assert sorted(found) == sorted(files)


@pytest.mark.parametrize("text", ["0/4", "5/4", "1", "a/b", "1/2/3", "-1/4"])
def test_other_parts_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        part(text)
