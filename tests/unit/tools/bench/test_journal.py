"""How fast a journal is, measured."""

from __future__ import annotations

from pathlib import Path

from seamless_verl.tools.bench.journal import measure


def test_measuring_counts_every_append_and_leaves_nothing(tmp_path: Path) -> None:
    found = measure(tmp_path, writers=4, appends=50, size=8)
    assert found["appends_per_s"] > 0 and 0 < found["median_ms"] <= found["p99_ms"] <= found["max_ms"]
    assert found["bytes_per_token"] > 8 and not [*tmp_path.iterdir()]
