"""When an engine is measured alone, and what a tool's time comes from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from seamless_verl.errors import ConfigError
from seamless_verl.tools.bench.training import engine_baseline
from seamless_verl.tools.bench.training.workloads import WORKLOADS, Workload

W1, W3 = WORKLOADS["w1"], WORKLOADS["w3"]
RATES = {32: 4000.0, 64: 6000.0}


@pytest.mark.parametrize(
    ("workload", "turn_s", "bound", "measurements", "expected"),
    [
        (W1, None, False, 0, W1),
        (W1, None, True, 1, W1),
        (W3, None, False, 1, W3.with_turn(W3.turn_s(RATES, 2))),
        (W3, None, True, 1, W3.with_turn(W3.turn_s(RATES, 2))),
        (W3, 2.0, False, 0, W3.with_turn(2.0)),
        (W3, 2.0, True, 1, W3.with_turn(2.0)),
    ],
)
def test_an_engine_is_measured_once_and_where_it_must_be(
    workload: Workload,
    turn_s: float | None,
    bound: bool,
    measurements: int,
    expected: Workload,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = list[str]()

    def measure(workload: Workload, model: Path, folder: Path, timeout_s: float) -> None:
        calls.append(workload.name)
        (folder / engine_baseline.RATES_FILE).write_text(json.dumps(RATES))

    monkeypatch.setattr(engine_baseline, "measure_rates", measure)
    for _ in range(2):
        assert (
            engine_baseline.with_tool_time(workload, turn_s, bound=bound, model=tmp_path, folder=tmp_path, timeout_s=1)
            == expected
        )
    assert len(calls) == measurements


def test_without_a_measure_a_tool_has_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_baseline, "measure_rates", lambda *places: None)
    with pytest.raises(ConfigError, match="--turn-s"):
        engine_baseline.with_tool_time(W3, None, bound=False, model=tmp_path, folder=tmp_path, timeout_s=1)
    assert engine_baseline.with_tool_time(W1, None, bound=True, model=tmp_path, folder=tmp_path, timeout_s=1) == W1
