"""The validation curve: what is kept of it, and how it is drawn."""

from __future__ import annotations

from pathlib import Path

from seamless_verl.trainer.step_log import HEIGHT, Point, ValidationCurve, text_plot


def points(*values: float) -> list[Point]:
    return [Point(10 * i, "val/reward/mean@1", value) for i, value in enumerate(values)]


def test_a_curve_is_read_back_by_step_and_a_repeated_step_counts_once(tmp_path: Path) -> None:
    curve = ValidationCurve.beside(str(tmp_path / "checkpoints"))
    assert curve.points() == []
    for step, value in ((0, 0.1), (20, 0.3), (10, 0.2), (20, 0.4)):
        curve.add(step, {"val-aux/a/reward/mean@4": value, "val-core/a/acc/mean@4": 0.9})
    assert [(p.step, p.value) for p in curve.points()] == [(0, 0.1), (10, 0.2), (20, 0.4)]


def test_a_resumed_run_drops_what_lies_beyond_it(tmp_path: Path) -> None:
    curve = ValidationCurve(tmp_path / "c.jsonl")
    curve.truncate_after(5)
    assert not curve.path.exists()
    for step in (0, 10, 20, 15):
        curve.add(step, {"val/reward/mean@1": float(step)})
    curve.truncate_after(15)
    assert [p.step for p in curve.points()] == [0, 10, 15]
    curve.truncate_after(15)
    curve.add(30, {"val/reward/mean@1": 1.0})
    assert [p.step for p in curve.points()] == [0, 10, 15, 30]
    assert [p.name for p in tmp_path.iterdir()] == ["c.jsonl"]


def test_a_run_from_nothing_keeps_no_point_of_an_earlier_one(tmp_path: Path) -> None:
    """Both validated before their first step."""
    curve = ValidationCurve(tmp_path / "c.jsonl")
    curve.add(0, {"val/reward/mean@1": 0.5})
    curve.truncate_after(0)
    assert curve.points() == []


def test_half_a_line_at_the_end_is_none(tmp_path: Path) -> None:
    curve = ValidationCurve(tmp_path / "curve.jsonl")
    curve.add(2, {"val-core/x/reward/mean@1": 0.5})
    with curve.path.open("a") as file:
        file.write('{"step": 3, "me')
    assert [point.step for point in curve.points()] == [2]
    curve.truncate_after(2)
    curve.add(3, {"val-core/x/reward/mean@1": 0.75})
    assert [point.value for point in curve.points()] == [0.5, 0.75]


def test_metrics_without_a_reward_are_no_point(tmp_path: Path) -> None:
    curve = ValidationCurve(tmp_path / "c.jsonl")
    curve.add(1, {"val-aux/num_turns/mean": 2.0})
    assert curve.points() == []


def test_with_several_data_sources_a_point_is_their_mean_and_names_all(tmp_path: Path) -> None:
    curve = ValidationCurve(tmp_path / "c.jsonl")
    curve.add(1, {"val-core/a/reward/mean@4": 0.5, "val-core/b/reward/mean@4": 0.25})
    of = "the mean of val-core/a/reward/mean@4 and val-core/b/reward/mean@4"
    assert curve.points() == [Point(1, of, 0.375)]


def test_the_plot_shows_both_ends_and_the_rise() -> None:
    text = text_plot(points(0.1, 0.2, 0.4))
    rows = [line for line in text.splitlines() if "|" in line]
    assert len(rows) == HEIGHT
    assert rows[0].rstrip().endswith("*") and rows[-1].split("|")[1].startswith("*")
    assert "from 0.100 to 0.400, 4.0 times" in text


def test_a_flat_or_short_curve_is_drawn_without_dividing_by_zero() -> None:
    assert "from 0.500 to 0.500" in text_plot(points(0.5, 0.5))
    assert "fewer than two" in text_plot(points(0.5))
    assert "times" not in text_plot(points(0.0, 0.5))
