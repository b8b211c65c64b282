"""How the rewards of a run's validations are drawn."""

from __future__ import annotations

from seamless_verl.runtime.step_metrics import StepRow
from seamless_verl.trainer.step_log import HEIGHT, validation_plot


def steps(*values: float) -> list[StepRow]:
    """Each with a validation, and with a step after it that has none."""
    rows = [(10 * i, {"val-core/a/reward/mean@1": value}) for i, value in enumerate(values)]
    return [StepRow(step + more, 0.0, {} if more else metrics) for step, metrics in rows for more in (0, 1)]


def test_the_plot_shows_both_ends_and_the_rise() -> None:
    text = validation_plot(steps(0.1, 0.2, 0.4))
    rows = [line for line in text.splitlines() if "|" in line]
    assert len(rows) == HEIGHT and "val-core/a/reward/mean@1" in text
    assert rows[0].rstrip().endswith("*") and rows[-1].split("|")[1].startswith("*")
    assert "from 0.100 to 0.400, 4.0 times" in text


def test_a_flat_or_short_curve_is_drawn_without_dividing_by_zero() -> None:
    assert "from 0.500 to 0.500" in validation_plot(steps(0.5, 0.5))
    assert validation_plot(steps(0.5)) == validation_plot([]) == ""
    assert "times" not in validation_plot(steps(0.0, 0.5))


def test_of_several_data_sources_the_mean_is_drawn() -> None:
    of = {"val-core/a/reward/mean@4": 0.5, "val-core/b/reward/mean@4": 0.25}
    text = validation_plot([StepRow(step, 0.0, of) for step in (0, 5)])
    assert "the mean of val-core/a/reward/mean@4 and val-core/b/reward/mean@4" in text
    assert "from 0.375 to 0.375" in text
