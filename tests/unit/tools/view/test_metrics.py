"""Charts show the metrics that a run has."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from seamless_verl.resources.ledger.activity import DeviceUse
from seamless_verl.runtime.step_metrics import StepMetrics, StepRow
from seamless_verl.tools.view import metrics
from seamless_verl.tools.view.metrics import CHARTS, MetricsReader, read_series

STEPS = [
    StepRow(0, 1.0, {"val-core/a/acc/mean@1": 0.25, "val-aux/a/reward/mean@1": 0.5}),
    StepRow(
        1,
        2.0,
        {"critic/score/mean": 0.5, "seamless/device/idle_share": 0.1, "own/metric": 7.0, "text": "x", "nan": None},
    ),
    StepRow(2, 3.0, {"critic/score/mean": 0.75}),
]
NAMES = ["critic/score/mean", "own/metric", "seamless/device/idle_share", *STEPS[0].metrics]


def test_a_chart_has_a_value_or_none_for_each_step() -> None:
    series = read_series(STEPS, NAMES)
    assert (series.steps, series.times) == ([0, 1, 2], [1.0, 2.0, 3.0])
    assert [chart.key for chart in series.charts] == ["reward", "validation", "idle"]
    assert series.values["critic/score/mean"] == [None, 0.5, 0.75]
    assert series.values["seamless/device/idle_share"] == [None, 0.1, None]
    assert "own/metric" in series.names and "own/metric" not in series.values
    assert series.every == 1


def test_a_kind_of_use_has_one_colour_in_lanes_and_chart() -> None:
    (chart,) = (one for one in CHARTS if one.of_use)
    assert [label for _, label in chart.lines] == [str(kind) for kind in DeviceUse], "as the lanes' legend has them"
    style = Path(metrics.__file__).with_name("assets").joinpath("style.css").read_text()
    assert all(f"--use-{kind}: #" in style for kind in DeviceUse)


def test_any_metric_can_be_asked_for() -> None:
    series = read_series(STEPS, NAMES, ["own/metric", "unknown"])
    assert series.values["own/metric"] == [None, 7.0, None] and "unknown" not in series.values


def test_the_validation_is_its_reward_or_else_its_first_core_metric() -> None:
    def validated(*names: str) -> tuple[tuple[str, str], ...]:
        charts = read_series([StepRow(1, 1.0, dict.fromkeys(names, 0.5))], names).charts
        return next((chart.lines for chart in charts if chart.key == "validation"), ())

    assert validated("val-core/b", "val-aux/x/reward/mean@1") == (("val-aux/x/reward/mean@1",) * 2,)
    two = ("val-core/a/reward/mean@1", "val-core/b/reward/mean@1")
    assert validated(*two) == tuple((name, name) for name in two), "a line for each data source"
    assert validated("val-core/b", "val-core/a", "val-aux/c") == (("val-core/a",) * 2,)
    assert validated("val-aux/c", "critic/score/mean") == ()


def test_a_run_without_steps_has_no_charts() -> None:
    assert read_series([], []).charts == ()


@pytest.mark.parametrize(("steps", "every"), [(2000, 1), (2001, 2), (9000, 5)])
def test_of_a_long_run_every_so_many_steps_are_shown_and_the_last(steps: int, every: int) -> None:
    series = read_series([StepRow(n, 0.0, {"perf/throughput": n}) for n in range(1, steps + 1)], ["perf/throughput"])
    assert series.every == every and series.steps[-1] == steps and len(series.steps) <= 2000
    assert {later - one for one, later in pairwise(series.steps)} == {every} and series.steps[0] <= every
    assert series.values["perf/throughput"] == series.steps


def test_charts_have_names_of_their_own() -> None:
    assert len({chart.key for chart in CHARTS}) == len({chart.title for chart in CHARTS}) == len(CHARTS)


def values(reader: MetricsReader) -> list[tuple[int, object]]:
    return [(row.step, row.metrics.get("loss")) for row in reader.steps()]


def test_the_file_is_read_as_it_grows(tmp_path: Path) -> None:
    metrics, reader = StepMetrics.beside(str(tmp_path)), MetricsReader(tmp_path)
    assert values(reader) == []
    for step in range(1, 4):
        metrics.add(step, {"loss": step})
        assert values(reader) == [(n, n) for n in range(1, step + 1)]
    whole = metrics.path.read_bytes()
    line = b'{"step": 4, "time": 0.0, "metrics": {"loss": 4}}\n'
    metrics.path.write_bytes(whole + line[:10])
    assert len(values(reader)) == 3, "half of a line"
    metrics.path.write_bytes(whole + line)
    assert values(reader)[-1] == (4, 4)
    metrics.add(4, {"other": 5})
    assert reader.steps()[-1].metrics == {"loss": 4, "other": 5} and reader.names == ["loss", "other"]


def test_what_a_resumed_run_does_again_counts_once(tmp_path: Path) -> None:
    metrics, reader = StepMetrics.beside(str(tmp_path)), MetricsReader(tmp_path)
    for step in (1, 2, 3):
        metrics.add(step, {"loss": step})
    assert len(values(reader)) == 3
    metrics.resume_at(1)
    assert values(reader) == [(1, 1)]
    metrics.add(2, {"loss": 20})
    assert values(reader) == [(1, 1), (2, 20)] == values(MetricsReader(tmp_path))
    metrics.path.unlink()
    assert values(reader) == []


def test_lines_of_others_are_left_out(tmp_path: Path) -> None:
    others = '{"step": "x", "time": 1, "metrics": {}}\n{"step": 2, "time": 1, "metrics": []}\n'
    text = others + '{"step": 3, "time": "x", "metrics": {}}\n'
    text += 'no json\n{"step": "x"}\n\n[]\n\xff\n{"step": 1, "time": 0.0, "metrics": {"loss": 1}}\n'
    StepMetrics.beside(str(tmp_path)).path.write_bytes(text.encode("latin-1"))
    assert values(MetricsReader(tmp_path)) == [(1, 1)]
