"""The soak: who holds what, whether a series is flat, its table, its sentence and its page."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.errors import ConfigError
from seamless_verl.tools.bench.growth import (
    BLOCKS,
    MIB,
    Sample,
    Verdict,
    growth,
    growths,
    line,
    measured,
    page,
    passing,
    summary,
    table,
)
from seamless_verl.tools.bench.soak import DEFAULTS, check_times, folder_bytes, role_of, with_defaults


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
    assert with_defaults([]) == list(DEFAULTS)
    assert with_defaults(["trainer.save_freq=7"])[-1] == "trainer.save_freq=7"
    assert sum(one.startswith("trainer.save_freq=") for one in with_defaults(["trainer.save_freq=7"])) == 1


@pytest.mark.parametrize(
    ("times", "key"),
    [((60.0, 10.0, 0.25), "--minutes"), ((3600.0, 0.0, 0.25), "--every"), ((3600.0, 10.0, 1.0), "--warm-up")],
)
def test_times_without_a_slope_are_refused(times: tuple[float, float, float], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        check_times(*times)


@pytest.mark.parametrize(
    ("command", "role"),
    [
        (["ray::DataPlane.begin()"], "ray::DataPlane"),
        (["ray::WorkerDict"], "ray::WorkerDict"),
        (["ray::IDLE", ""], "ray::IDLE"),
        (["/opt/ray/raylet/raylet", "--x=1"], "raylet"),
        (["python", "-W", "ignore", "-m", "seamless_verl.main_ppo", "a=1"], "seamless_verl.main_ppo"),
        (["/usr/bin/python3.11", "-u", "/lib/ray/_private/log_monitor.py"], "_private/log_monitor.py"),
        (["python", "-c", "pass"], "python"),
        ([], "ended"),
    ],
)
def test_roles(command: list[str], role: str) -> None:
    assert role_of(command) == role


def test_a_journal_counts_by_itself(tmp_path: Path) -> None:
    for name in ("trajectories.sqlite", "trajectories-3.sqlite-wal", "model.bin"):
        (tmp_path / name).write_bytes(b"x" * 10_000)
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "gone").symlink_to(tmp_path / "nowhere")
    sizes = list(folder_bytes("checkpoints", tmp_path))
    assert sorted({name for name, _ in sizes}) == ["checkpoints", "journal"]
    assert sum(size for name, size in sizes if name == "journal") >= 20_000


AT = [10.0 * number for number in range(360)]  # an hour


def test_a_line_by_hand() -> None:
    slope, error = line([0, 1, 2, 3], [1, 2, 2, 3])
    assert slope == pytest.approx(0.6)  # sum of (-1.5, -0.5, 0.5, 1.5) x (1, 2, 2, 3) = 3, over 5
    assert error == pytest.approx((0.2 / 2 / 5) ** 0.5)  # residuals -0.1, 0.3, -0.3, 0.1: their squares sum to 0.2


@given(st.floats(-1e3, 1e3), st.floats(-1e6, 1e6))
def test_a_straight_line_has_its_slope(hourly: float, begin: float) -> None:
    found = growth(AT, [begin + hourly * at / 3600 for at in AT])
    assert found.hourly == pytest.approx(hourly, abs=1e-6)


def test_what_grows_beyond_noise_is_said() -> None:
    draw = Random(1)
    grows = growth(AT, [1000 + at / 10 + draw.gauss(0, 20) for at in AT])
    assert grows.verdict is Verdict.GROWS and grows.hourly == pytest.approx(360, abs=3 * grows.hourly_error)
    assert growth(AT, [1000 - at / 10 for at in AT]).verdict is Verdict.SHRINKS


def test_noise_and_small_changes_are_flat() -> None:
    draw = Random(2)
    assert growth(AT, [1000 + draw.gauss(0, 200) for _ in AT]).verdict is Verdict.FLAT
    assert growth(AT, [1000 + at / 3600 for at in AT]).verdict is Verdict.FLAT, "0.1% of it"
    assert growth(AT, [50 + at / 3600 for at in AT]).verdict is Verdict.GROWS, "2% of it"
    assert growth(AT, [50 + at / 3600 for at in AT], harmless=1.0).verdict is Verdict.FLAT
    assert growth(AT, [7.0] * len(AT)).verdict is Verdict.FLAT


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        growth(AT[: 2 * BLOCKS - 1], [0.0] * (2 * BLOCKS - 1))
