"""Which patches of a series are in a file."""

from __future__ import annotations

import difflib
import random
import runpy
from pathlib import Path

import pytest
from support.paths import ROOT

SCRIPT = str(ROOT / "scripts/apply_patches")


@pytest.mark.parametrize("seed", range(20))
def test_a_series_on_one_file_is_told_apart_at_every_length(tmp_path: Path, seed: int) -> None:
    script, rng = runpy.run_path(SCRIPT), random.Random(seed)
    states, patches = [[f"{rng.random()}\n" for _ in range(60)]], []
    for number in range(3):
        states.append([f"{rng.random()}\n" if rng.random() < 0.1 else line for line in states[-1]])
        for at in (9, 25, 41):  # each moves the lines below it
            states[-1][at : at + rng.randrange(3)] = [f"{rng.random()}\n"] * (1 + number)
        patches.append(tmp_path / f"{number}.patch")
        patches[-1].write_text("".join(difflib.unified_diff(states[-2], states[-1], "a/f", "b/f")))
    files = [{"f": "".join(state).encode()} for state in states]
    for count, current in enumerate(files):
        without, patched, applied = script["split"](current, patches)
        assert (without, patched, set(applied)) == (files[0], files[3], set(patches[:count]))
