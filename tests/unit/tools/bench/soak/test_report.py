"""The soak's table, its sentence and its page."""

from __future__ import annotations

import pytest

from seamless_verl.errors import ConfigError
from seamless_verl.tools.bench.soak.__main__ import DEFAULTS, check_times, given
from seamless_verl.tools.bench.soak.report import MIB, Verdict, growths, measured, page, passing, summary, table
from seamless_verl.tools.bench.soak.samples import Sample


def run_of(minutes: int) -> list[Sample]:
    """The data plane grows by 60 MiB an hour after it has warmed up, the trainer does not; a worker passes by."""
    samples = []
    for number in range(6 * minutes):
        at = 10.0 * number
        values = {("memory", "ray::DataPlane"): 500 * MIB * (at < 600) + 300 * MIB + at / 60 * MIB}
        values |= {("memory", "ray::WorkerDict"): 900 * MIB, ("descriptors", "raylet"): 50.0 + number % 2}
        if number == 70:
            values["memory", "ray::IDLE"] = MIB
        samples.append(Sample(at, number // 2, values))
    return samples


def test_the_warm_up_is_left_out() -> None:
    samples = run_of(60)
    kept = measured(samples, 0.25)
    assert kept[0].at == pytest.approx(900, abs=10) and kept[-1] is samples[-1]
    found = growths(kept)
    assert found["memory", "ray::DataPlane"].hourly == pytest.approx(60 * MIB)
    assert found["memory", "ray::DataPlane"].verdict is Verdict.GROWS
    assert found["memory", "ray::WorkerDict"].verdict is found["descriptors", "raylet"].verdict is Verdict.FLAT
    assert passing(samples) == {("memory", "ray::IDLE")} and ("memory", "ray::IDLE") not in found
    lines = table(found).splitlines()
    assert any("ray::DataPlane" in line and "+60.00" in line and "grows" in line for line in lines)
    text = summary(kept, found)
    assert "2 of 3 series are flat; not flat: memory of ray::DataPlane grows" in text and "0.75 hours" in text
    html = page("Soak <b>", text, samples, kept[0].at)
    assert "Soak &lt;b&gt;" in html and "ray::IDLE" in html


def test_what_the_user_sets_is_kept() -> None:
    assert given([]) == list(DEFAULTS)
    assert given(["trainer.save_freq=7"])[-1] == "trainer.save_freq=7"
    assert sum(one.startswith("trainer.save_freq=") for one in given(["trainer.save_freq=7"])) == 1


@pytest.mark.parametrize(
    ("times", "key"),
    [((60.0, 10.0, 0.25), "--minutes"), ((3600.0, 0.0, 0.25), "--every"), ((3600.0, 10.0, 1.0), "--warm-up")],
)
def test_times_without_a_slope_are_refused(times: tuple[float, float, float], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        check_times(*times)
