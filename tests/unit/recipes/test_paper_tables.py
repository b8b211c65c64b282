"""The simulated tables of published comparisons: every arm is there, and each figure is what its column says."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.recipes import RECIPES, load

[TABLES] = load(RECIPES / "paper_tables", "tables")


@pytest.mark.parametrize(("name", "devices"), [("single_turn", 4), ("swe", 32)])
def test_each_mode_is_simulated_and_compared(name: str, devices: int) -> None:
    table = TABLES.TABLES[name]
    small = replace(table, workload=replace(table.workload, prompts=8, samples=2, turns=min(table.workload.turns, 3)))
    results = TABLES.simulated(small, devices, steps=4, seeds=1)
    rows = list(TABLES.rows(results))
    assert len(rows) == 8 and sum(row[0].startswith("verl ") for row in rows) == 4
    by_name = {row[0]: row for row in rows}
    assert by_name["verl sync"][2] == "1.00" and by_name["verl sync"][5] == "0"
    assert max(float(row[3]) for row in rows if row[0].startswith("verl ")) == 1.0
    for row in rows:
        assert float(row[2]) == pytest.approx(
            results[row[0]][0].tokens_per_s / results["verl sync"][0].tokens_per_s, abs=0.01
        )
    for name, of in results.items():
        if name.startswith(TABLES.OURS):
            assert of[0].max_staleness <= int(name[-1])
