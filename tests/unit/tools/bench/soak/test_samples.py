"""Who holds what: processes by their roles, files by their kinds."""

from __future__ import annotations

from pathlib import Path

import pytest

from seamless_verl.tools.bench.soak.samples import folder_bytes, role_of


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
